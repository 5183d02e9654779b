"""What the values of a body take once decoded is never more than was said before."""

import tracemalloc

import msgspec
import pytest

from caravan_dialects.api.body import most_decoded_bytes

BODIES = {
    "objects": b"[" + b"{}," * 30_000 + b"{}]",
    "small objects": b"[" + b'{"a":{}},' * 30_000 + b"{}]",
    "nested objects": b"[" + (b'{"a":' * 100 + b"1" + b"}" * 100 + b",") * 300 + b"1]",
    "lists": b"[" + b"[]," * 30_000 + b"[]]",
    "nested lists": b"[" + (b"[" * 100 + b"]" * 100 + b",") * 500 + b"1]",
    "integers": b"[" + b"1000," * 60_000 + b"1]",
    "numbers": b"[" + b"1.5," * 60_000 + b"1]",
    "strings": b"[" + b'"ab",' * 50_000 + b'"ab"]',
    "names": msgspec.json.encode({f"k{number}": number for number in range(30_000)}),
    "a long string": msgspec.json.encode("a" * 1_500_000),
    "escapes": msgspec.json.encode('\\"\n' * 500_000),
    "a wide character": msgspec.json.encode("🐫" + "a" * 1_500_000),
    "an escaped wide character": b'"\\ud83d\\udc2b' + b"a" * 1_500_000 + b'"',
    "other letters": msgspec.json.encode("語é" * 500_000),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_bound_holds(body: bytes) -> None:
    tracemalloc.start()
    try:
        decoded = msgspec.json.decode(body)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del decoded
    assert taken <= most_decoded_bytes(body) + 200
