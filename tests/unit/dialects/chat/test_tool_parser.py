"""The parser splits an output into text and calls."""

import pytest

from caravan_dialects.chat.tool_format import (
    GENERIC,
    HERMES,
    LLAMA_3,
    MISTRAL,
    QWEN_3_CODER,
    ToolFormat,
    known_format_of,
)
from caravan_dialects.chat.tool_parser import CallPart, TextPart, ToolParser
from caravan_testing.tool_families import joined

Read = tuple[str, list[tuple[str, str]]]


def read(tool_format: ToolFormat, pieces: list[str], max_calls: int | None = None) -> Read:
    parser = ToolParser(tool_format, {"f": None, "get_weather": None}, max_calls)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined(parts + parser.finish())


F = '{"name": "f", "arguments": {"a": "}\\"{"}}'
F_READ = ("f", '{"a": "}\\"{"}')

TWO = [F_READ, F_READ]

CASES: list[tuple[ToolFormat, str, Read]] = [
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": "x\n",}', ("", [("f", '{"a": "x\\n"}')])),
    (LLAMA_3, '{"name": "f", "parameters": "{\\"a\\": 1,}"}', ("", [("f", '{"a": 1}')])),
    (QWEN_3_CODER, "<tool_call>\n<function=f>\n<parameter=a>\nx y", ("\n<parameter=a>\nx y", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": {"b": [1</tool_call>', ("", [("f", '{"a": {"b": [1]}}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', ("", [("f", '{"a": "x"}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1, b: 2}}</tool_call>', (", b: 2}}", [("f", '{"a": 1}')])),
    # Several calls in one tag.
    (HERMES, f"<tool_call>[{F}, {F}]</tool_call>", ("", TWO)),
    (HERMES, f"<tool_call>\n[\n  {F},\n  {F}\n]\n</tool_call> Well.", (" Well.", TWO)),
    (HERMES, f"<tool_call>{F}\n{F}</tool_call>\n<tool_call>{F}</tool_call>", ("", [*TWO, F_READ])),
    (HERMES, f"<tool_call>[{F}, {F}", ("", TWO)),
    (HERMES, f"<tool_call>{F}</tool_call> {F}", (f" {F}", [F_READ])),
    (HERMES, f"<tool_call>[{F}, 7]</tool_call>", (", 7]", [F_READ])),
    (HERMES, "just text", ("just text", [])),
    (HERMES, "  spaced \n", ("  spaced \n", [])),
    (HERMES, "a < b <tool", ("a < b <tool", [])),
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", ("", [F_READ])),
    (HERMES, f"Let me see.\n<tool_call>{F}</tool_call>", ("Let me see.", [F_READ])),
    (HERMES, f"<tool_call>{F}</tool_call>\n<tool_call>{F}</tool_call>\n", ("", [F_READ, F_READ])),
    (HERMES, f"<tool_call>{F}", ("", [F_READ])),
    (HERMES, f"<tool_call>{F}</tool_call> and more", (" and more", [F_READ])),
    (HERMES, f"<tool_call>{F} and </tool_call>", (" and", [F_READ])),
    (HERMES, "<tool_call>\nno json</tool_call>", ("<tool_call>\nno json</tool_call>", [])),
    (HERMES, "<tool_call>{'name'", ("<tool_call>{'name'", [])),
    (HERMES, '<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1,', ("", [("f", '{"a": [1]}')])),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"id": 7, "type": "function", "name": "f", "arguments": {}}</tool_call>', ("", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "x": [{"y": "]"}]}</tool_call>', ("", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', ("", [("f", "{}")])),
    (HERMES, F, (F, [])),
    (LLAMA_3, '{"name": "get_weather", "parameters": {"city": "Łódź"}}', ("", [("get_weather", '{"city": "Łódź"}')])),
    (LLAMA_3, f"<|python_tag|>{F}", ("", [F_READ])),
    (LLAMA_3, f"{F}; {F}", ("", [F_READ, F_READ])),
    (LLAMA_3, "Well, {x}", ("Well, {x}", [])),
    (LLAMA_3, '{"name": "Bob", "parameters": {}}', ('{"name": "Bob", "parameters": {}}', [])),
    (LLAMA_3, f"Sure. <|python_tag|>{F}", ("Sure.", [F_READ])),
    (GENERIC, f"\n{F}\n", ("", [F_READ])),
    (GENERIC, f"[{F}, {F}]", ("", [F_READ, F_READ])),
    (GENERIC, "[1, 2]", ("[1, 2]", [])),
    (GENERIC, '{"age": 3}', ('{"age": 3}', [])),
    (GENERIC, " \n", (" \n", [])),
    (MISTRAL, f"[TOOL_CALLS][{F}, {F}]", ("", [F_READ, F_READ])),
    (MISTRAL, f"[TOOL_CALLS] [{F}]", ("", [F_READ])),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f{}", ("", [("f", "{}"), ("f", "{}")])),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a":[]}', ("", [("f", '{"a":[]}')])),
    (MISTRAL, "[TOOL_CALLS]g[ARGS]{}", ("[TOOL_CALLS]g[ARGS]{}", [])),
    (MISTRAL, "[TOOL] no", ("[TOOL] no", [])),
]


@pytest.mark.parametrize(("tool_format", "output", "expected"), CASES)
def test_an_output_is_split_into_text_and_calls(tool_format: ToolFormat, output: str, expected: Read) -> None:
    assert read(tool_format, [output]) == expected
    assert read(tool_format, list(output)) == expected


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": "x\n\ty"}', '{"a": "x\\n\\ty"}'),
        ('{"a": [1, 2, ], }, ', '{"a": [1, 2]}'),
        ('{"a": "\\d\\\'\\u1"}', '{"a": "\\\\d\'\\\\u1"}'),
        ('{"a": "say "hi" now"}', '{"a": "say \\"hi\\" now"}'),
        ("""{'a': True, "b": None}""", '{"a": true, "b": null}'),
        ('{"a": "\\ud83d\\ude00\\ud83d"}', '{"a": "\\ud83d\\ude00\\ufffd"}'),
    ],
)
def test_what_models_do_wrong_in_json_is_mended(written: str, meant: str) -> None:
    output = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    assert read(HERMES, [output]) == read(HERMES, list(output)) == ("", [("f", meant)])


@pytest.mark.parametrize("call", ['"f", "arguments": [1]', '"f", "args": {"a": 1}', '"g", "arguments": {}'])
def test_what_is_no_call_of_a_known_function_is_text(call: str) -> None:
    output = f'<tool_call>{{"name": {call}}}</tool_call>'
    assert read(HERMES, [output]) == read(HERMES, list(output)) == (output, [])


def test_the_parser_ignores_everything_after_the_last_allowed_call() -> None:
    parser = ToolParser(HERMES, {"f": None}, max_calls=1)
    text = f"<tool_call>{F}</tool_call><tool_call>{F}</tool_call>"
    assert joined(parser.feed(text)) == ("", [F_READ])
    assert parser.done
    assert parser.feed("more") == []
    assert parser.finish() == []


def test_the_name_and_the_arguments_are_released_as_they_arrive() -> None:
    parser = ToolParser(HERMES, {"f": None})
    assert parser.feed("Hm <tool") == [TextPart("Hm")]
    assert parser.feed('_call>{"name": "f", "arg') == []
    assert parser.feed('uments": {"a"') == [CallPart(0, "f", '{"a"')]
    assert parser.feed(": 1") == [CallPart(0, None, ": ")]
    assert parser.feed("}}</tool_call>") == [CallPart(0, None, "1}")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", GENERIC),
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}<tool_call><function=x>{% endif %}", QWEN_3_CODER),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ('{{ tools }} "parameters" <|python_tag|>', LLAMA_3),
        ('{{ tools }} "parameters" {{ "ipython" }}', LLAMA_3),
        ('{{ tools }} "parameters"', GENERIC),
    ],
)
def test_the_format_is_recognized_from_the_template(template: str, expected: ToolFormat) -> None:
    assert known_format_of(template) == expected


def test_where_the_output_was_cut_off_a_call_lacks_its_end() -> None:
    for arguments in ('{"a": "x', '{"a": [1,', '{"a": tr', '{"a": "\\u12', '{"a": {"b": "c"'):
        parser = ToolParser(HERMES, {"f": None})
        parts = parser.feed(f'<tool_call>{{"name": "f", "arguments": {arguments}')
        assert joined(parts + parser.finish(cut=True)) == ("", [("f", arguments)])
