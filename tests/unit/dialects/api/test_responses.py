"""What the model is shown of items that other servers and agents make, and the names by which it knows tools."""

import itertools
from typing import Any

import pytest

from caravan_dialects.api.openai.chat.messages import FUNCTION_NAME
from caravan_dialects.api.openai.responses.item_messages import calls_of, count_system, turns_of
from caravan_dialects.api.openai.responses.items import read_items
from caravan_dialects.api.openai.responses.other_items import plain_items
from caravan_dialects.api.openai.responses.tools import ToolName, model_name, model_names

Shown = list[tuple[str, ...]]
COMMAND = {"stdout": "a\n", "stderr": "bad\n", "outcome": {"type": "exit", "exit_code": 2}}
LATE = {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}
FINE = {"stdout": "ok\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
PATCH = {"type": "delete_file", "path": "a"}
TOOLS = [{"type": "function", "name": "f"}, {"type": "namespace", "name": "n", "tools": [{"name": "g"}, 5]}, 5]


def shown(*items: dict[str, Any]) -> Shown:
    """Return calls as (name, arguments), outputs as ("=", text), and messages as (role, text)."""
    result: Shown = []
    for item in read_items("input", items, {}):
        for one in plain_items(item):
            match one:
                case {"type": "function_call"}:
                    result.append((*filter(None, (one.get("namespace"),)), one["name"], one["arguments"]))
                case {"type": "function_call_output", "output": output}:
                    result.append(("=", output))
                case {"type": "message", "content": [{"text": text}]}:
                    result.append((one["role"], text))
                case _:
                    raise AssertionError(one)
    return result


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (
            [
                {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "c", "output": [FINE, COMMAND, LATE]},
            ],
            [("shell", '{"commands":["ls"]}'), ("=", "ok\na\nbad\n[exit code 2]\n[timeout]")],
        ),
        (
            [
                {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"command": ["ls"]}},
                {"type": "local_shell_call_output", "id": "c", "output": '{"output": "a"}'},
            ],
            [("local_shell", '{"command":["ls"]}'), ("=", '{"output": "a"}')],
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "c", "operation": PATCH, "status": "completed"},
                {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
                {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "no file"},
            ],
            [("apply_patch", '{"type":"delete_file","path":"a"}'), ("=", "failed"), ("=", "no file")],
        ),
        (
            [
                {"type": "tool_search_call", "arguments": {"query": "x"}},
                {"type": "tool_search_output", "tools": TOOLS},
                {"type": "tool_search_output", "tools": []},
            ],
            [("tool_search", '{"query":"x"}'), ("=", "Found tools: f, n__g"), ("=", "Found tools: none")],
        ),
        (
            [{"type": "mcp_call", "id": "m", "server_label": "s", "name": "f", "arguments": '{"a":1}', "output": "2"}],
            [("s", "f", '{"a":1}'), ("=", "2")],
        ),
        (
            [{"type": "mcp_call", "name": "f", "arguments": "odd", "error": {"type": "http", "code": 5}}],
            [("f", '{"arguments":"odd"}'), ("=", '{"type":"http","code":5}')],
        ),
        (
            [
                {"type": "program", "call_id": "p", "code": "1 + 1", "fingerprint": "f"},
                {"type": "program_output", "call_id": "p", "result": "2", "status": "completed"},
            ],
            [("program", '{"code":"1 + 1"}'), ("=", "2")],
        ),
        (
            [{"type": "code_interpreter_call", "code": "1", "outputs": [{"type": "logs", "logs": "2"}]}],
            [("code_interpreter", '{"code":"1"}'), ("=", "2")],
        ),
        (
            [{"type": "file_search_call", "queries": ["q"], "results": [{"file_id": "f", "text": "found"}]}],
            [("file_search", '{"queries":["q"]}'), ("=", "found")],
        ),
        ([{"type": "file_search_call", "queries": ["q"], "results": None}], []),
        ([{"type": "compaction", "encrypted_content": "gAAAAABpX2Zm9"}], []),
        ([{"type": "compaction", "encrypted_content": "We greeted."}], [("user", "We greeted.")]),
        (
            [{"type": "compaction", "encrypted_content": "x", "summary": [{"type": "summary_text", "text": "We"}]}],
            [("user", "We")],
        ),
        ([{"type": "new_call", "name": "f", "arguments": {"a": 1}}], [("f", '{"a":1}')]),
        ([{"type": "new_call", "name": "f", "namespace": "n", "input": "a"}], [("n", "f", '{"input":"a"}')]),
        ([{"type": "new_output", "call_id": "c", "result": [{"text": "a"}, {"type": "image"}]}], [("=", "a\n[image]")]),
        ([{"type": "new_note", "role": "assistant", "content": [{"text": "a"}, {"text": "b"}]}], [("assistant", "ab")]),
        ([{"type": "new_note", "role": 5, "text": "a"}], [("user", "a")]),
        *[
            ([{"type": kind, "tools": [], "reasoning": {}, "result": "aGk="}], [])
            for kind in (
                "additional_tools",
                "compaction_trigger",
                "configuration_update",
                "image_generation_call",
                "mcp_list_tools",
                "web_search_call",
                "new_kind",
            )
        ],
        # Malformed ones do not fail a turn either.
        ([{"type": "shell_call"}, {"type": "shell_call_output"}], [("shell", "{}"), ("=", "")]),
        ([{"type": "mcp_call", "name": 5}, {"type": "compaction", "encrypted_content": 5}], []),
        ([{"type": "tool_search_output", "tools": 5}, {"type": "code_interpreter_call"}],
         [("=", "5"), ("code_interpreter", "{}"), ("=", "")]),
    ],
)  # fmt: skip
def test_what_the_model_is_shown(items: list[dict[str, Any]], expected: Shown) -> None:
    assert shown(*items) == expected


def test_a_picture_of_a_screen_is_a_picture() -> None:
    screenshot = {"type": "computer_screenshot", "image_url": "data:image/png;base64,aGk="}
    [item] = read_items("input", [{"type": "computer_call_output", "call_id": "c", "output": screenshot}], {})
    [output] = plain_items(item)
    assert output["output"] == [{"type": "input_image", "image_url": screenshot["image_url"], "detail": "auto"}]


def test_what_the_model_is_shown_decides_where_turns_begin_and_what_belongs_together() -> None:
    user = {"role": "user", "content": "Hi"}
    items = read_items(
        "input",
        [
            {"type": "additional_tools", "tools": []},
            {"role": "developer", "content": "Be kind."},
            user,
            {"type": "configuration_update"},
            user,
            {"type": "shell_call", "call_id": "c", "action": {}},
            user,
            {"type": "shell_call_output", "call_id": "c", "output": []},
        ],
        {},
    )
    assert count_system(items) == 2
    assert turns_of(items) == [2, 6]
    assert list(calls_of(items)) == [(5, 7)]


def test_no_item_refers_to_a_file_of_the_store() -> None:
    """Stored items have objects in place of large files, which clients must not be able to write themselves."""
    named = {"$file": "00" * 32}
    parts = [{"type": "input_image", "image_url": named}, {"type": "input_audio", "input_audio": {"data": named}}, 5]
    for key in ("content", "output"):
        [item] = read_items("input", [{"type": "new_kind", key: parts}], {})
        assert [part["text"] for part in item[key][:2]] == ["[image]", "[audio]"]
        assert item[key][2] == 5


def test_names_are_joined_if_that_is_a_name() -> None:
    assert model_names([ToolName("add"), ToolName("add", "sums")]) == {
        ToolName("add"): "add",
        ToolName("add", "sums"): "sums__add",
    }
    assert model_name(ToolName("add", "sums")) == "sums__add"


def test_no_two_names_are_the_same_in_any_order() -> None:
    tools = [
        ToolName("a__b"),
        ToolName("b", "a"),
        ToolName("c", "a__b"),
        ToolName("b__c", "a"),
        ToolName("c" * 60, "long"),
        ToolName("c" * 61, "long"),
        ToolName("à b", "x"),
        ToolName("é b", "x"),
        ToolName("", ""),
    ]
    names = model_names(tools)
    assert names[tools[0]] == "a__b"
    assert len(set(names.values())) == len(tools)
    assert all(FUNCTION_NAME.fullmatch(name) for name in names.values()), names
    for some in itertools.permutations(tools, 3):
        assert all(model_names(dict.fromkeys([*some, *tools]))[tool] == name for tool, name in names.items())


def test_a_name_with_a_digest_is_drawn_again_if_a_client_has_it_too() -> None:
    long = ToolName("c" * 70, "long")
    taken = ToolName(model_name(long))
    names = model_names([long, taken])
    assert names[taken] == taken.name
    assert names[long] != taken.name
    assert FUNCTION_NAME.fullmatch(names[long])
