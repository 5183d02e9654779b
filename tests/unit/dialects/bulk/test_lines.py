"""The lines of a batch's input file."""

import io
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_dialects.bulk import lines
from caravan_dialects.bulk.lines import CheckedLines, checked_lines, prefix_key

ENDPOINT = "/v1/completions"


def line(custom_id: str, **changes: Any) -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": "Hi"}} | changes
    return json.dumps(request).encode() + b"\n"


def checked(*rows: bytes) -> CheckedLines:
    return checked_lines(io.BytesIO(b"".join(rows)), ENDPOINT)


def test_each_line_says_where_it_stands_in_the_file() -> None:
    rows = [line("a"), b"\n", line("b"), line("c").rstrip(b"\n")]
    found = checked(*rows)
    assert found.errors == ()
    whole = b"".join(rows)
    placed = sorted(found.lines, key=lambda one: one.number)
    assert [whole[one.start : one.start + one.size] for one in placed] == [rows[0], rows[2], rows[3]]
    assert [one.custom_id for one in placed] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("rows", "code", "row"),
    [
        ([line("a"), b"nonsense\n"], "invalid_json_line", 2),
        ([line("a", body=None)], "invalid_json_line", 1),
        ([b'{"custom_id": "a", "url": "/v1/completions"}\n'], "invalid_json_line", 1),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("")], "invalid_custom_id", 1),
        ([line("a", method="GET")], "invalid_method", 1),
        ([line("a", url="/v1/embeddings")], "mismatched_endpoint", 1),
        ([], "empty_file", None),
        ([b"\n\n"], "empty_file", None),
        ([b'{"custom_id": "a", "url": "/v1/completions", "body": ' + b"[" * 5000 + b"\n"], "invalid_json_line", 1),
    ],
)
def test_a_wrong_line_refuses_the_batch_and_is_named(rows: list[bytes], code: str, row: int | None) -> None:
    found = checked(*rows)
    assert found.lines == ()
    assert [(error.code, error.line) for error in found.errors] == [(code, row)]


def test_a_batch_has_a_limited_number_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 2)
    assert len(checked(line("a"), line("b")).lines) == 2
    [error] = checked(line("a"), line("b"), line("c")).errors
    assert (error.code, error.line) == ("too_many_requests", 3)


def chats(*texts: Sequence[str]) -> list[Mapping[str, Any]]:
    return [{"messages": [{"role": "user", "content": text} for text in one]} for one in texts]


def keys_of(bodies: Sequence[Mapping[str, Any]]) -> list[bytes]:
    return [prefix_key(msgspec.Raw(json.dumps(body).encode())) for body in bodies]


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=12), st.sampled_from(["prompt", "input"]))
def test_lines_with_a_common_prefix_are_neighbours(prefixes: list[str], field: str) -> None:
    rows = [
        line(str(place), body={field: prefix * 2_000 + str(place)}, url=ENDPOINT)
        for place, prefix in enumerate(prefixes)
    ]
    ordered = sorted(checked(*rows).lines, key=lambda one: one.rank)
    order = [prefixes[one.number] for one in ordered]
    assert sum(one != other for one, other in pairwise(order)) == len(set(prefixes)) - 1
    # Within a prefix, they keep the order of the file as far as their ends do not differ.
    assert sorted(one.number for one in ordered) == list(range(len(rows)))


def test_conversations_that_go_on_are_next_to_their_beginnings() -> None:
    begin = ["x" * 600]
    keys = keys_of(chats([*begin], [*begin, "y" * 600], ["z" * 600]))
    assert keys[1][:8] == keys[0][:8]
    assert keys[2][:4] != keys[0][:4]
