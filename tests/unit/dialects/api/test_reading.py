"""Bodies are read in one pass and take no more than was said before; those that do not fit are mended by their type."""

import tracemalloc
from typing import Annotated, Any

import msgspec
import pytest

from caravan_dialects.api.body import most_decoded_bytes
from caravan_dialects.api.errors import BodyMismatchError, MalformedBodyError, ValidationError
from caravan_dialects.api.generation.reading import BodyReader
from caravan_dialects.api.generation.schema import EXACT, NoEffect, OnlyNull, SwitchedOff, TextOnly, Unsupported

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


class Cat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cat"):
    lives: int = 9


class Dog(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="dog"):
    weight: float = 1.0


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    shade: NoEffect = None


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    count: int | None = None
    weight: float | None = None
    ids: list[str | int | list[int]] | None = None
    pairs: list[tuple[int, float | bool]] | None = None
    biases: dict[str, int] | None = None
    pet: Cat | Dog | None = None
    content: str | list[Part] | None = None
    anything: dict[str, Any] | None = None
    renamed: int | None = msgspec.field(name="from", default=None)
    exact: Annotated[list[Part] | None, msgspec.Meta(extra={EXACT: True})] = None
    user: NoEffect = None
    banned: Unsupported = None
    number: OnlyNull = None
    switch: SwitchedOff = None
    modalities: TextOnly = None


READER = BodyReader(Body)


def read(text: str | bytes, *, exact: bool = False) -> tuple[Body, list[str]]:
    return READER.read(text if isinstance(text, bytes) else text.encode(), exact=exact)


@pytest.mark.parametrize(
    ("text", "expected", "ignored"),
    [
        ('{"count":1,"x":1}', Body(count=1), ["x"]),
        ('{"x":1,"count":1,"x":2}', Body(count=1), ["x"]),
        ('{"x":null}', Body(), []),
        ('{"content":[{"text":"a","x":{"y":1}},{"text":"b","y":[]}]}', Body(content=[Part("a"), Part("b")]),
         ["content[0].x", "content[1].y"]),
        ('{"pet":{"type":"cat","lives":7.0,"x":0}}', Body(pet=Cat(7)), ["pet.x"]),
        ('{"pet":{"type":"dog","weight":2,"lives":1}}', Body(pet=Dog(2.0)), ["pet.lives"]),
        ('{"anything":{"x":{"y":2.0}},"z":1}', Body(anything={"x": {"y": 2.0}}), ["z"]),
        ('{"from":2.0,"renamed":3}', Body(renamed=2), ["renamed"]),
        ('{"user":{"a":1},"content":[{"text":"a","shade":1}]}', Body(user={"a": 1}, content=[Part("a", 1)]),
         ["user", "content[0].shade"]),
        ('{"x":1,"user":"u"}', Body(user="u"), ["x", "user"]),
    ],
)  # fmt: skip
def test_what_is_unknown_or_without_effect_is_ignored_and_named(text: str, expected: Body, ignored: list[str]) -> None:
    assert read(text) == (expected, ignored)


@pytest.mark.parametrize("exact", [False, True])
def test_whole_numbers_may_have_a_decimal_point(exact: bool) -> None:
    text = '{"count":2.0,"weight":2.0,"ids":["a",3.0,[4.0,5]],"pairs":[[6.0,1.0],[7,false]],"biases":{"a":8e0}}'
    body, ignored = read(text, exact=exact)
    assert (body, ignored) == (
        Body(count=2, weight=2.0, ids=["a", 3, [4, 5]], pairs=[(6, 1.0), (7, False)], biases={"a": 8}),
        [],
    )
    assert [type(number) for number in (body.count, body.weight)] == [int, float]


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ('{"count":2.5}', "count", "Expected `int | null`, got `float` - at `$.count`"),
        ('{"x":1,"count":2.5}', "count", "Expected `int | null`, got `float` - at `$.count`"),
        ('{"x":1,"content":[{"text":5}]}', "content[0].text", "Expected `str`, got `int` - at `$.content[0].text`"),
        ('{"count":1e30}', "count", "Expected `int | null`, got `float` - at `$.count`"),
        ('{"count":1e400}', "count", "Number out of range - at `$.count`"),
        ('{"pet":{"type":"bird","x":1}}', "pet.type", "Invalid value 'bird' - at `$.pet.type`"),
        ('{"exact":[{"text":"a","x":1}]}', "exact[0].x", "Object contains unknown field `x` - at `$.exact[0]`"),
        ("[]", "", "Expected `object`, got `array`"),
    ],
)
def test_what_cannot_be_mended_is_refused_by_its_field(text: str, field: str, reason: str) -> None:
    with pytest.raises(BodyMismatchError) as raised:
        read(text)
    assert raised.value.field == field
    assert reason in str(raised.value)


def test_an_exact_reader_refuses_unknown_fields() -> None:
    for text in ('{"x":1}', '{"x":null}', '{"count":2.0,"x":1}'):
        with pytest.raises(BodyMismatchError, match="unknown field `x`"):
            read(text, exact=True)
    assert read('{"user":"u"}', exact=True) == (Body(user="u"), ["user"])


@pytest.mark.parametrize(
    "text", [b'{"x\xff":1}', b'{"x":"\xff"}', b'{"x":1', b'{"x":1}}', b'{"x":' + b"[" * 100_000, b'{"x":{"a":NaN}}']
)
def test_what_is_no_json_is_refused_also_within_unknown_fields(text: bytes) -> None:
    with pytest.raises(MalformedBodyError):
        read(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"banned": False, "switch": -1, "modalities": ["text"]},
        {"banned": [], "switch": {}},
        {"banned": 0, "switch": "", "number": None},
    ],
)
def test_what_is_not_supported_may_be_switched_off(fields: dict[str, Any]) -> None:
    assert READER.read(msgspec.json.encode(fields))[1] == []


@pytest.mark.parametrize("fields", [{"banned": ["a"]}, {"banned": -1}, {"number": 0}, {"switch": 2},
                                    {"modalities": ["text", "audio"]}])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any]) -> None:
    [name] = fields
    with pytest.raises(
        ValidationError, match=rf"`instances\[1\].{name}` is not supported: leave it out, or set it to"
    ) as raised:
        READER.read(msgspec.json.encode(fields), inside="instances[1]")
    assert raised.value.field == f"instances[1].{name}"


def test_a_part_of_a_body_has_the_paths_of_the_whole() -> None:
    data = b'{"x":1,"content":[{"text":"a","shade":1,"y":2}]}'
    _, ignored = READER.read(data, inside="instances[1]")
    assert ignored == ["instances[1].x", "instances[1].content[0].y", "instances[1].content[0].shade"]
    with pytest.raises(BodyMismatchError, match=r"at `\$.instances\[1\].count`"):
        READER.read(b'{"x":1,"count":"a"}', inside="instances[1]")


def test_few_of_very_many_unknown_fields_are_named() -> None:
    assert len(READER.read(msgspec.json.encode({f"x{n}": n for n in range(1000)}))[1]) == 64


class Open(msgspec.Struct, frozen=True):
    """A type that allows unknown fields."""

    count: int = 0
    part: Part | None = None


def test_a_type_that_allows_unknown_fields_names_them_too() -> None:
    body, ignored = BodyReader(Open).read(b'{"count":1.0,"x":1,"part":{"text":"a","y":1}}')
    assert (body, ignored) == (Open(1, Part("a")), ["x", "part.y"])


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_bound_holds(body: bytes) -> None:
    tracemalloc.start()
    try:
        decoded = msgspec.json.decode(body)
        traces = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    del decoded
    # Other threads of the process allocate too: only what was allocated here is counted.
    allocated_here = traces.filter_traces([tracemalloc.Filter(True, __file__)])
    taken = sum(trace.size for trace in allocated_here.traces)
    assert len(body) // 100 < taken <= most_decoded_bytes(body) + 200
