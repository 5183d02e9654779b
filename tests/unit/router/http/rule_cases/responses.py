"""Rules of responses and conversations."""

from unit.router.http.rule_cases.case import RESPONSES, Case

from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.responses import rules as responses_rules

CASES = [
    Case(
        responses_rules.item_type_error,
        RESPONSES,
        {"input": [{"type": 5}]},
        "input[0].type",
        "`input[0].type` must be the type of an item, a text. Given: 5",
    ),
    Case(
        responses_rules.ambiguous_tool_error,
        RESPONSES,
        {
            "input": "Hi",
            "tool_choice": {"type": "function", "name": "f"},
            "tools": [
                {"type": "namespace", "name": name, "tools": [{"type": "function", "name": "f"}]} for name in "ab"
            ],
        },
        "tool_choice.namespace",
        "`tool_choice.namespace` must be set: several namespaces have a tool 'f'",
    ),
    Case(
        responses_rules.too_many_items_error,
        RESPONSES,
        {"input": [{}] * 10_001},
        "input",
        "`input` must have at most 10000 items, including those of earlier turns. Given: 10001",
    ),
    Case(
        responses_rules.items_size_error,
        RESPONSES,
        {"input": [{"role": "user", "content": "x" * (1 << 20)}] * 32},
        "input",
        "`input` must have at most 33554432 bytes, including the items of earlier turns",
        limits=Limits(payload_limit=40 << 20),
    ),
    Case(
        responses_rules.unknown_item_error,
        RESPONSES,
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input[0].id",
        "`input[0].id` names no item of the conversation. Given: 'msg_1'",
    ),
    Case(
        responses_rules.repeated_item_error,
        "/v1/conversations",
        {"import": {"metadata": {}, "items": [{"id": "a", "role": "user", "content": "x"}] * 2}},
        "import.items[1].id",
        "`import.items[1].id` must be unique, and another item has it. Given: 'a'",
    ),
    Case(
        responses_rules.one_of_fields_error,
        "/v1/conversations",
        {"items": [], "import": {"metadata": {}, "items": []}},
        "import",
        "either `items` or `import` must be set, not both",
    ),
    Case(
        responses_rules.two_contexts_error,
        RESPONSES,
        {"previous_response_id": "resp_1", "conversation": "conv_1"},
        "previous_response_id",
        "`previous_response_id` and `conversation` cannot be used together",
    ),
    Case(
        responses_rules.metadata_error,
        RESPONSES,
        {"metadata": {str(number): "" for number in range(17)}},
        "metadata",
        "`metadata` must have at most 16 keys. A key may have 64 characters, its text 512",
    ),
    Case(
        responses_rules.needs_background_error,
        RESPONSES,
        {"background_options": {"completion_window": "2h"}},
        "background_options.completion_window",
        "`background_options.completion_window` must be \"soonest\" without `background`. Given: '2h'",
    ),
    Case(
        responses_rules.unknown_server_error,
        RESPONSES,
        {"input": "Hi", "tools": [{"type": "mcp", "server_label": "x"}]},
        "tools[0].server_label",
        "`tools[0].server_label` must be an MCP server that is configured here: none, since the router was started "
        "without --mcp-config. Given: 'x'",
    ),
    Case(
        responses_rules.background_needs_store_error,
        RESPONSES,
        {"background": True, "store": False},
        "background",
        "`background` needs `store`, which must not be false",
    ),
    Case(
        responses_rules.starting_after_error,
        f"{RESPONSES}/resp_1?stream=true&starting_after=x",
        {},
        "starting_after",
        "`starting_after` must be the sequence_number of an event. Given: 'x'",
        method="GET",
    ),
]
