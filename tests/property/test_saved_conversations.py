"""Whatever bytes a file of saved conversations has, it is loaded or refused with a StateError."""

import hashlib
import json
import struct
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import caravan
from caravan import Executor
from caravan.saved_state import decode

_MAGIC = b"caravan conversations 1\n"
_OPTIONS = {"backend": "fake", "ctx_size": 64, "parallel": 4, "cache_ram": 0}

_NUMBERS = st.integers(-1, 70) | st.sampled_from([1 << 31, 1 << 47, 1 << 48, 1 << 63, 1 << 64, 10**30])
_VALUES = _NUMBERS | st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.lists(_NUMBERS, max_size=2)


def _with_checksum(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


@cache
def _saved() -> tuple[dict[str, Any], bytes]:
    """Return the header and the rest of a file of two conversations that share cells."""
    with Executor("toy.gguf", **_OPTIONS) as executor:  # type: ignore[arg-type]
        first = executor.create()
        first.prompt("conversation", all_logits=True)
        executor.infer()
        second = first.fork()
        second.prompt("s that wait")
        data = executor.save_all(executor.conversations, None)
    at = len(_MAGIC) + 4
    (length,) = struct.unpack_from("<I", data, len(_MAGIC))
    return json.loads(data[at : at + length]), data[at + length : -32]


def _file(header: object, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return _with_checksum(_MAGIC + struct.pack("<I", len(text)) + text + rest)


def _load(data: bytes) -> None:
    """Load all that is saved, and use it."""
    with Executor("toy.gguf", **_OPTIONS) as executor:  # type: ignore[arg-type]
        for conversation in executor._load_all(decode(data)):
            assert len(conversation.text) <= 4 * conversation.token_count
            if conversation.state is caravan.State.IDLE and conversation.tokens:
                conversation.prompt([])
        while executor.infer().waiting:
            pass


def test_the_file_that_is_changed_here_can_be_loaded() -> None:
    header, rest = _saved()
    assert [one["shared"] for one in header["conversations"]] == [0, 13]
    _load(_file(header, rest))


@given(body=st.binary(max_size=200), length=st.none() | st.integers(0, 300))
def test_random_bytes_are_refused(body: bytes, length: int | None) -> None:
    head = b"" if length is None else struct.pack("<I", length)
    with pytest.raises(caravan.StateError):
        decode(_with_checksum(_MAGIC + head + body))


@given(
    number=st.integers(0, 1),
    changes=st.dictionaries(
        st.sampled_from(["tokens", "waits", "first_output", "rows", "held", "source", "shared", "cells", "extra"]),
        _VALUES,
        min_size=1,
        max_size=3,
    ),
)
def test_a_changed_conversation_is_loaded_or_refused(number: int, changes: dict[str, Any]) -> None:
    header, rest = _saved()
    header = header | {"conversations": [dict(one) for one in header["conversations"]]}
    header["conversations"][number] |= changes
    with suppress(caravan.StateError):
        _load(_file(header, rest))


@given(
    changes=st.dictionaries(
        st.sampled_from(["model", "model_fingerprint", "cells_fingerprint", "vocabulary_size", "conversations"]),
        _VALUES,
        min_size=1,
        max_size=2,
    ),
    cut=st.integers(0, 50),
    more=st.binary(max_size=8),
)
def test_a_changed_header_is_loaded_or_refused(changes: dict[str, Any], cut: int, more: bytes) -> None:
    header, rest = _saved()
    with suppress(caravan.StateError):
        _load(_file(header | changes, rest[: len(rest) - cut] + more))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"x":' * 200_000, "9" * 100_000, "\ud800", "null", "{}", ""])
def test_hostile_json_is_refused(text: str) -> None:
    head = text.encode("utf-8", "surrogatepass")
    with pytest.raises(caravan.StateError, match="makes no sense"):
        decode(_with_checksum(_MAGIC + struct.pack("<I", len(head)) + head))


def test_a_header_that_claims_more_than_there_is_allocates_nothing() -> None:
    header, rest = _saved()
    for name in ("tokens", "rows", "cells"):
        claimed = [header["conversations"][0] | {name: 1 << 45}]
        with pytest.raises(caravan.StateError, match=r"too short|more is computed"):
            decode(_file(header | {"conversations": claimed}, rest))


def test_cells_are_shared_by_equal_tokens_only() -> None:
    header, rest = _saved()
    first = header["conversations"][0]
    # The second conversation begins with its tokens.
    at = 5 * first["tokens"] + 4 * first["rows"] * header["vocabulary_size"] + first["cells"]
    (token,) = struct.unpack_from("<i", rest, at)
    other = rest[:at] + struct.pack("<i", token ^ 1) + rest[at + 4 :]
    with pytest.raises(caravan.StateError, match="shares cells of other tokens"):
        decode(_file(header, other))
