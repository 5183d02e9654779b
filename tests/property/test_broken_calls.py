"""Whatever breaks a call, nothing that the model wrote disappears, and arguments that are released are an object."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_dialects.chat.tool_derivation import ToolFormats
from caravan_dialects.chat.tool_format import ToolFormat
from caravan_dialects.chat.tool_parser import Part, TextPart, ToolParser
from caravan_testing.tool_families import FAMILIES, Call, Family, render_here

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "count": {"type": "integer"},
        "tree": {"type": "object", "properties": {"deep": {"type": "array", "items": {"type": "string"}}}},
    },
}
FUNCTIONS: dict[str, Mapping[str, Any] | None] = {"f": PARAMETERS, "clock": None}
CALLS: list[Call] = [
    ("f", {"city": "qza1 qzb2\n qzc3", "count": 12, "tree": {"deep": ["qzd4", "qze5 qzf6"]}}),
    ("f", {"city": 'qzg7 "qzh8"'}),
]
WORD = re.compile(r"qz[a-z]\d")
# What models and their tokenizers put where it does not belong.
PIECES = ["", ",", '"', "'", "{", "}", "[", "]", "<", ">", "\n", "\t", "\\", "\\u12", "null", ": ", "=", "x", "</", "1"]


async def _formats() -> list[tuple[Family, ToolFormat]]:
    formats = ToolFormats(render_here)
    return [(family, await formats.of(family.template)) for family in FAMILIES]


FORMATS = asyncio.run(_formats())


def read(tool_format: ToolFormat, texts: Sequence[str], *, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(tool_format, FUNCTIONS)
    parts: list[Part] = [part for text in texts for part in parser.feed(text)]
    text, calls = "", list[tuple[str, str]]()
    for part in parts + parser.finish(cut=cut):
        if isinstance(part, TextPart):
            text += part.text
        elif part.name is None:
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
        else:
            calls.append((part.name, part.arguments))
    return text, calls


def check(tool_format: ToolFormat, output: str) -> None:
    text, calls = read(tool_format, [output])
    assert read(tool_format, list(output)) == (text, calls), output
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict), (output, arguments)
    shown = text + "".join(arguments for _, arguments in calls)
    assert set(WORD.findall(output)) <= set(WORD.findall(shown)), (output, text, calls)
    shown = "".join(read(tool_format, [output], cut=True)[0]) + str(read(tool_format, [output], cut=True)[1])
    assert set(WORD.findall(output)) <= set(WORD.findall(shown)), (output, shown)


@pytest.mark.examples
@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=[family.name for family in FAMILIES])
def test_a_call_that_is_cut_off_stays_whole_or_becomes_text(number: int) -> None:
    family, tool_format = FORMATS[number]
    output = family.written(CALLS[: family.most_calls])
    for end in range(0, len(output), 3):
        check(tool_format, output[:end])


@given(data=st.data())
def test_what_breaks_a_call_takes_nothing_away(data: st.DataObject) -> None:
    family, tool_format = data.draw(st.sampled_from(FORMATS))
    output = family.written(CALLS[: data.draw(st.integers(1, family.most_calls))])
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(output)))
        output = output[:at] + data.draw(st.sampled_from(PIECES)) + output[at + data.draw(st.integers(0, 3)) :]
    check(tool_format, output)
