"""However an output is split, the parser's result is the same; it loses nothing and repeats nothing."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from caravan_dialects.chat.tool_format import (
    GENERIC,
    HERMES,
    HOLE,
    LFM_2,
    LLAMA_3,
    MISTRAL,
    QWEN_3_CODER,
    Style,
    Tags,
    ToolFormat,
)
from caravan_dialects.chat.tool_parser import CallPart, Part, TextPart, ToolParser

FORMATS = (HERMES, MISTRAL, LLAMA_3, GENERIC)
GEMMA_4 = ToolFormat(
    styles=(Style.BRACES, Style.OBJECT), opening="<|tool_call>call:", closing="<tool_call|>", quote='<|"|>'
)
GLM = ToolFormat(
    styles=(Style.TAGS,),
    opening="<tool_call>",
    closing="\n</tool_call>",
    tags=Tags(key_opening="\n<arg_key>", key_closing="</arg_key>\n<arg_value>", value_closing="</arg_value>"),
)
SOLAR = ToolFormat(
    styles=(Style.JSON, Style.OBJECT),
    section_opening="<tool_calls>",
    section_closing="</tool_calls>",
    opening=f"<tool_call>{HOLE}<name>",
    closing="</tool_call>",
    name_closing="<args>",
)
ALL_FORMATS = (*FORMATS, QWEN_3_CODER, LFM_2, GEMMA_4, GLM, SOLAR)
FRAGMENTS = st.sampled_from([
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool", "[TOOL", "{", "}", "[", "]"),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}', '{"name": "f", "parameters": {}}'),
    *("<function=", "<function=f>", "<parameter=a>", "\n</parameter>", "</function>", "<arg_key>", "</arg_key>"),
    *("```json", "<arg_value>", "</arg_value>", "<|tool_call>call:", "f{", '<|"|>', "a:", "f(", "a=", "'", ")"),
    *("<tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>", "<tool_calls>", "<name>", "<args>", "</tool_calls>"),
    *("```", '"name"', '"f"', '"arguments"', ":", ",", ";", '"', "\\", " ", "\n", "text", "é", "null", "1", "f"),
])  # fmt: skip
OUTPUTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=14).map("".join)
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
), max_size=3)  # fmt: skip
NAMES = {"f", "h"}


def merged(parts: list[Part]) -> list[tuple[str, str]]:
    """Join neighbouring parts that belong together: ("", text) or (name, arguments)."""
    result: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case TextPart():
                if result and not result[-1][0]:
                    result[-1] = ("", result[-1][1] + part.text)
                else:
                    result.append(("", part.text))
            case CallPart(name=None):
                name, arguments = result[-1]
                assert name in NAMES
                result[-1] = (name, arguments + part.arguments)
            case CallPart(name=name):
                assert name is not None
                assert part.index == sum(bool(one) for one, _ in result)
                result.append((name, part.arguments))
    return result


def read(tool_format: ToolFormat, pieces: list[str]) -> list[tuple[str, str]]:
    parser = ToolParser(tool_format, dict.fromkeys(NAMES))
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    return merged(parts + parser.finish())


@given(tool_format=st.sampled_from(ALL_FORMATS), output=OUTPUTS, data=st.data())
def test_the_result_does_not_depend_on_how_the_output_is_split(
    tool_format: ToolFormat, output: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    pieces = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    whole = read(tool_format, [output])
    assert read(tool_format, pieces) == whole
    assert read(tool_format, list(output)) == whole


@example(tool_format=LLAMA_3, output=" <|python_tag|>")
@given(tool_format=st.sampled_from(ALL_FORMATS), output=OUTPUTS)
def test_an_output_without_calls_is_returned_unchanged(tool_format: ToolFormat, output: str) -> None:
    parts = read(tool_format, [output])
    if all(not name for name, _ in parts):
        assert "".join(text for _, text in parts) == output


@given(
    tool_format=st.sampled_from(FORMATS),
    calls=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3),
)
def test_calls_come_back_with_their_names_and_arguments(
    tool_format: ToolFormat, calls: list[tuple[str, object]]
) -> None:
    key = tool_format.arguments_key
    bodies = [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]
    if tool_format is HERMES:
        output = "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    elif tool_format is LLAMA_3:
        output = "; ".join(bodies)
    else:
        output = f"{'[TOOL_CALLS]' if tool_format is MISTRAL else ''}[{', '.join(bodies)}]"
    parts = read(tool_format, list(output))
    assert [(name, json.loads(arguments)) for name, arguments in parts] == calls
