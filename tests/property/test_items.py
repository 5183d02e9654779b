"""Items of any type and form: none that is no message, thought, call or output of OpenAI's fails a turn."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from caravan_dialects.api.generation.parts import NO_MEDIA
from caravan_dialects.api.openai.chat.messages import template_messages
from caravan_dialects.api.openai.responses.item_messages import (
    ItemTexts,
    calls_of,
    count_system,
    messages_of,
    turns_of,
)
from caravan_dialects.api.openai.responses.items import read_items
from caravan_dialects.api.openai.responses.other_items import PLAIN
from caravan_dialects.api.openai.responses.tools import offered_tools
from caravan_dialects.conversations.packing import referenced, with_files, without_files

KINDS = (
    "additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
    "computer_call", "computer_call_output", "configuration_update", "file_search_call", "local_shell_call",
    "local_shell_call_output", "mcp_call", "mcp_list_tools", "program", "program_output", "shell_call",
    "shell_call_output", "tool_search_call", "tool_search_output", "unheard_of",
)  # fmt: skip
KEYS = (
    "action", "arguments", "call_id", "code", "content", "description", "encrypted_content", "error", "id",
    "image_url", "input", "name", "namespace", "operation", "outcome", "output", "outputs", "parameters", "queries",
    "result", "results", "role", "server_label", "status", "stderr", "stdout", "summary", "text", "tools", "type",
    "$file", "data", "input_audio",
)  # fmt: skip
WORDS = (
    "",
    "user",
    "assistant",
    "system",
    "function",
    "namespace",
    "custom",
    "input_image",
    "input_audio",
    "exit",
    "{}",
)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(WORDS) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
ITEMS = st.builds(
    lambda fields, kind: {**fields, "type": kind},
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8),
    st.sampled_from(KINDS) | st.text(max_size=5).filter(lambda kind: kind not in PLAIN | {"item_reference"}),
)


@given(st.lists(ITEMS, max_size=4))
def test_no_item_of_another_server_fails_a_turn(given_items: list[dict[str, Any]]) -> None:
    items = read_items("input", [*given_items, {"role": "user", "content": "Hi"}], {})
    offered = offered_tools((), items)
    assert len({tool.function.name for tool in offered.tools}) == len(offered.tools)
    messages = messages_of(None, items, ItemTexts(NO_MEDIA, offered))
    shown = template_messages(messages, NO_MEDIA, developer_known=False)
    assert shown[-1]["content"].endswith("Hi")
    assert turns_of(items)[-1:] <= [len(items) - 1]
    assert 0 <= count_system(items) < len(items)
    assert all(call <= output for call, output in calls_of(items))
    stored, files = without_files(items)
    assert len(referenced(stored)) <= len(files)
    assert with_files(stored, files) == items
