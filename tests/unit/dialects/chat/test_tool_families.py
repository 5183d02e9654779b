"""Calls of every family are read back as they were written, however they arrive, and constraints allow them."""

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import jsonschema
import pytest

from caravan_dialects.chat.thought_reader import ThoughtCalls
from caravan_dialects.chat.tool_derivation import ToolFormats
from caravan_dialects.chat.tool_format import CONTROL, KEY, ToolFormat, is_tag, pieces
from caravan_dialects.chat.tool_grammar import opens_calls, tool_constraint
from caravan_dialects.chat.tool_parser import Part, TextPart, ToolParser
from caravan_testing.examples import places
from caravan_testing.scripted_engine import ScriptedEngine
from caravan_testing.tool_families import FAMILIES, Call, Family, accepts, drawn, joined, render_here

LOOSE = {"type": "object", "additionalProperties": {"type": "integer"}}
NESTED = {
    "type": "object",
    "properties": {"deep": {"type": "array", "items": {"type": "integer"}}, "key": {"type": "string"}},
    "required": ["deep"],
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "sure": {"type": "boolean"},
        "tree": NESTED,
        "words": {"type": "array", "items": {"type": "string"}},
    },
}
FUNCTIONS: dict[str, Mapping[str, Any] | None] = {"get_weather": PARAMETERS, "clock": None, "f": PARAMETERS}
CODE = 'if a < b:\n    return "x"  # it\'s {y}, [z]\n\n<b>\\\n'
CASES: dict[str, list[Call]] = {
    "one": [("get_weather", {"city": "Paris"})],
    "parallel": [("get_weather", {"city": "Paris", "count": 3}), ("f", {"city": "b"})],
    "nested": [("f", {"tree": {"deep": [1, 2], "key": "k"}, "words": ["p", "q"]})],
    "types": [("f", {"city": "12", "count": -3, "ratio": 1.5, "sure": True})],
    "unicode": [("get_weather", {"city": "Łódź 東京 \U0001f600"})],
    "empty": [("clock", {})],
    "empty and empty": [("clock", {}), ("clock", {})],
    "code": [("f", {"city": CODE})],
    "empty text": [("f", {"city": ""})],
}
# `make test-more` has the others.
USUAL_CASES = ("one", "parallel", "nested", "code")


FORMATS = ToolFormats(render_here)


def loaded(parts: Sequence[Part]) -> tuple[str, list[Call]]:
    text, calls = joined(parts)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def read(tool_format: ToolFormat, texts: Sequence[str]) -> tuple[str, list[Call]]:
    parser = ToolParser(tool_format, FUNCTIONS)
    parts = [part for text in texts for part in parser.feed(text)]
    return loaded(parts + parser.finish())


def cases() -> list[Any]:
    return [
        pytest.param(
            family, calls, id=f"{family.name}: {name}", marks=[] if name in USUAL_CASES else [pytest.mark.slow]
        )
        for family in FAMILIES
        for name, calls in CASES.items()
        if len(calls) <= family.most_calls
    ]


@pytest.mark.examples
@pytest.mark.parametrize(("family", "calls"), cases())
async def test_what_a_template_writes_is_read_back_however_it_is_split(family: Family, calls: list[Call]) -> None:
    tool_format = await FORMATS.of(family.template)
    assert read(tool_format, [family.written(calls)]) == ("", calls)
    content = "Let me see." if family.splits else ""
    output = family.written(calls, content)
    assert read(tool_format, list(output)) == (content, calls)
    for at in places(len(output)):
        assert read(tool_format, [output[:at], output[at:]]) == (content, calls), at


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_arguments_are_streamed(family: Family) -> None:
    tool_format = await FORMATS.of(family.template)
    output = family.written([("f", {"city": "a long text of many words"})])
    parser = ToolParser(tool_format, FUNCTIONS)
    parser.feed(output[: output.index("many")])
    before = output.index("words")
    [part] = parser.feed(output[output.index("many") : before])
    assert not isinstance(part, TextPart)
    assert part.name is None
    assert "man" in part.arguments


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_text_that_is_no_call_stays(family: Family) -> None:
    tool_format = await FORMATS.of(family.template)
    unknown = family.written([("unknown", {"city": "x"})])
    for text in ("Just text.", "a < b, [c] {d} (e)", f"Well. {unknown}", f"{unknown[: len(unknown) // 2]}"):
        assert read(tool_format, list(text)) == (text, [])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_where_control_tokens_open_calls_their_text_does_not(family: Family) -> None:
    tool_format = await FORMATS.of(family.template)
    controls = {
        piece
        for text in tool_format.delimiters
        for piece in pieces(text)
        if is_tag(piece) and piece[-1] in ">][" and piece[0] in "<[]" and KEY not in piece
    }
    marked = tool_format.with_controls(controls)
    calls = CASES["nested"]
    output = family.written(calls)
    tokens = [CONTROL + piece if piece in controls else piece for piece in pieces(output)]
    assert read(marked, tokens) == ("", calls)
    if any(trigger[0] == CONTROL for trigger in marked.triggers) and not marked.unopened:
        assert read(marked, [output]) == (output, [])


@pytest.mark.parametrize(("family", "calls"), cases())
async def test_the_constraint_allows_what_the_model_writes(family: Family, calls: list[Call]) -> None:
    tool_format = await FORMATS.of(family.template)
    constraint = await tool_constraint(ScriptedEngine(), tool_format, FUNCTIONS, several=len(calls) > 1)
    if not family.enforced or (len(calls) > 1 and tool_format.single):
        return
    output = _native(family, calls)
    assert accepts(constraint.source, output), (output, constraint.source)
    assert not accepts(constraint.source, f"{output}x")
    assert not accepts(constraint.source, output.replace(calls[0][0], "unknown"))


# A call that nothing opens cannot be told from a thought.
MARKED = [family for family in FAMILIES if family.splits and family.name != "Gemma 3"]
THOUGHTS = ("I should look.", "First <b>, then [c].\n\nSo:")


@pytest.mark.parametrize("family", MARKED, ids=lambda family: family.name)
async def test_a_call_at_the_end_of_a_thought_is_not_lost(family: Family) -> None:
    tool_format = await FORMATS.of(family.template)
    calls = CASES["parallel" if family.most_calls > 1 else "one"]
    written = family.written(calls)
    for thought in THOUGHTS:
        for texts in ([f"{thought}\n{written}"], list(f"{thought}\n{written}")):
            reader = ThoughtCalls(tool_format, FUNCTIONS)
            shown = "".join(reader.feed(text) for text in texts)
            rest, found = reader.finish()
            assert (shown + rest, loaded(found)) == (thought, ("", calls))


@pytest.mark.parametrize("family", MARKED, ids=lambda family: family.name)
async def test_a_call_that_a_model_only_thought_of_stays_in_the_thought(family: Family) -> None:
    tool_format = await FORMATS.of(family.template)
    written = family.written(CASES["one"])
    for thought in (f"I will write {written} and more.", f"{written}\nNo. {written}\nNo!"):
        for texts in ([thought], list(thought)):
            reader = ThoughtCalls(tool_format, FUNCTIONS)
            shown = "".join(reader.feed(text) for text in texts)
            rest, found = reader.finish()
            assert (shown + rest, found) == (thought, [])
    reader = ThoughtCalls(tool_format, FUNCTIONS)
    assert reader.feed(f"So: {written}") + reader.drop() == f"So: {written}"
    assert reader.finish() == ("", [])


BOUNDED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["C", "F"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "sure": {"type": "boolean"},
        "tree": {
            "type": "object",
            "properties": {"flag": {"type": "boolean"}, "pair": {"type": "array", "items": {"enum": [1, 2]}}},
            "required": ["flag"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_whatever_the_constraint_allows_is_a_valid_call(family: Family) -> None:
    tool_format = await FORMATS.of(family.template)
    functions = {"get_weather": BOUNDED, "clock": None}
    constraint = await tool_constraint(ScriptedEngine(), tool_format, functions, several=True)
    for seed in range(4):
        output = drawn(constraint.source, Random(seed), most=2000)
        parser = ToolParser(tool_format, functions)
        text, calls = loaded([*parser.feed(output), *parser.finish()])
        assert (text, bool(calls)) == ("", True), output
        for name, arguments in calls:
            jsonschema.validate(arguments, BOUNDED if name == "get_weather" else {"maxProperties": 0})


# Nothing but a name, a bracket or a word opens their calls, or something else may do so, too.
NOT_OPENED = {"Gemma 3", "xLAM", "Llama 3", "Llama 4", "gpt-oss", "GigaChat 3", "Muse Glimmer", "Functionary 3.2"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_calls_behind_a_text_match_their_schemas_and_texts_are_free(family: Family) -> None:
    tool_format = await FORMATS.of(family.template)
    assert opens_calls(tool_format) == (family.name not in NOT_OPENED)
    if family.name in NOT_OPENED:
        return
    calls = CASES["one" if tool_format.single else "parallel"]
    constraint = await tool_constraint(ScriptedEngine(), tool_format, FUNCTIONS, several=True, beside=())
    output = _native(family, calls)
    first = tool_format.opening_units[0]
    for text in ("", "Let me see.", "First <b>, then [c].\n\nSo: {", f"{first[:-1]} is no "):
        assert accepts(constraint.source, text)
        assert accepts(constraint.source, f"{text}{output}"), (constraint.source, f"{text}{output}")
        assert not accepts(constraint.source, f"{text}{output}x")
        assert not accepts(constraint.source, f"{text}{output.replace(calls[0][0], 'unknown')}")
        assert not accepts(constraint.source, f"{text}{output.replace('city', 'town')}")
        assert not accepts(constraint.source, f"{text}{first}")


def _native(family: Family, calls: list[Call]) -> str:
    output = family.written(calls)
    if family.name == "Functionary 3.2":
        # The prompt ends with it.
        return output.removeprefix(">>>")
    return output.strip() if family.name != "gpt-oss" else output.replace("json{", "json<|message|>{")


FUNCTIONARY = next(family for family in FAMILIES if family.name == "Functionary 3.2")


@pytest.mark.parametrize("before", ["", ">>>"])
async def test_what_stands_before_a_text_of_functionary_is_left_out(before: str) -> None:
    tool_format = await FORMATS.of(FUNCTIONARY.template)
    for content in ("Let me see.", "all", "1 >>> 2\nf {"):
        for calls in (CASES["parallel"], []):
            output = f"{before}all\n{content}{FUNCTIONARY.written(calls)}"
            assert read(tool_format, [output]) == read(tool_format, list(output)) == (content, calls)
