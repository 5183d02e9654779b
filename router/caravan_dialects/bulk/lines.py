"""Reads the lines of a batch's input file, and orders them by their common prefixes."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import msgspec

from caravan_dialects.bulk.records import Line, LineError

MAX_LINES = 50_000
MAX_BYTES = 200 << 20
"""Of an input file. Both are OpenAI's limits."""
_MOST_ERRORS = 50
_MOST_ID_CHARACTERS = 512
_MOST_LINE_BYTES = 32 << 20
# A prompt is compared in blocks of this many bytes, up to so many blocks; beyond them, lines keep the file's order.
_BLOCK_BYTES, _MOST_BLOCKS, _DIGEST_BYTES = 256, 256, 4


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line: OpenAI's form."""

    custom_id: str
    body: msgspec.Raw
    url: str
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class CheckedLines:
    """The lines of a file in the order in which they are worked off, or why the batch is refused."""

    lines: tuple[Line, ...] = ()
    errors: tuple[LineError, ...] = ()


_LINE = msgspec.json.Decoder(RequestLine)


class _PromptFields(msgspec.Struct):
    """What a prompt is made of in any dialect, in the order in which a template renders it."""

    model: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_PROMPT = msgspec.json.Decoder(_PromptFields)


def read_line(data: bytes) -> RequestLine:
    """Return a line that was checked before."""
    return _LINE.decode(data)


def checked_lines(file: BinaryIO, endpoint: str) -> CheckedLines:
    """Check all lines of ``file`` for requests of ``endpoint``. Blocks for as long as the file takes to read."""
    lines: list[tuple[bytes, Line]] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    for row, start, data in _rows(file):
        if len(errors) >= _MOST_ERRORS:
            break
        if len(lines) >= MAX_LINES:
            errors.append(LineError("too_many_requests", f"A batch may have at most {MAX_LINES} requests", row))
            break
        try:
            one = read_line(data)
            key = prefix_key(one.body)
        except (msgspec.MsgspecError, RecursionError) as error:
            errors.append(LineError("invalid_json_line", f"The line is not a valid request: {error}"[:300], row))
            continue
        if (error_of_line := _error_of(one, endpoint, seen, row)) is not None:
            errors.append(error_of_line)
            continue
        seen.add(one.custom_id)
        lines.append((key, Line(number=len(lines), custom_id=one.custom_id, start=start, size=len(data))))
    if not (lines or errors):
        errors.append(LineError("empty_file", "The input file has no requests"))
    if errors:
        return CheckedLines(errors=tuple(errors))
    ordered = sorted(lines, key=lambda keyed: (keyed[0], keyed[1].number))
    return CheckedLines(tuple(replace(line, rank=rank) for rank, (_, line) in enumerate(ordered)))


def _rows(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from 1), start and bytes of each line that is not blank."""
    start = row = 0
    while data := file.readline(_MOST_LINE_BYTES):
        row += 1
        if data.strip():
            yield row, start, data
        start += len(data)


def _error_of(one: RequestLine, endpoint: str, seen: set[str], row: int) -> LineError | None:
    if not 0 < len(one.custom_id) <= _MOST_ID_CHARACTERS:
        message = f"`custom_id` must have 1 to {_MOST_ID_CHARACTERS} characters. Given: {len(one.custom_id)}"
        return LineError("invalid_custom_id", message, row)
    if one.custom_id in seen:
        message = f"`custom_id` must be unique in the file. Given twice: {one.custom_id[:100]!r}"
        return LineError("duplicate_custom_id", message, row)
    if one.method != "POST":
        return LineError("invalid_method", f"`method` must be POST. Given: {one.method[:20]!r}", row)
    if one.url != endpoint:
        message = f"`url` must be the endpoint of the batch, {endpoint}. Given: {one.url[:100]!r}"
        return LineError("mismatched_endpoint", message, row)
    return None


def prefix_key(body: msgspec.Raw) -> bytes:
    """Return what sorts requests so that those with long common prefixes are neighbours.

    It has a few bytes for each block of the prompt, which depend on all blocks before, too. So it is short however long
    the prompts are. Raises msgspec.MsgspecError if the body is not an object.
    """
    fields = _PROMPT.decode(body)
    texts = (getattr(fields, name) for name in fields.__struct_fields__)
    # Not the bracket at the end of a list, after which another message would come.
    prompt = b"\0".join(bytes(text).rstrip(b']" \n') for text in texts)
    key, chained = bytearray(), b""
    for start in range(0, min(len(prompt), _BLOCK_BYTES * _MOST_BLOCKS), _BLOCK_BYTES):
        digest = hashlib.blake2b(chained + prompt[start : start + _BLOCK_BYTES], digest_size=16)
        chained = digest.digest()
        key += chained[:_DIGEST_BYTES]
    return bytes(key)
