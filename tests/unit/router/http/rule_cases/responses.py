"""Rules of responses and conversations."""

from unit.router.http.rule_cases.case import RESPONSES, Case

from caravan_router.http.limits import Limits
from caravan_router.http.openai.responses import rules as responses_rules

CASES = [
    Case(
        responses_rules.UnsupportedItemError,
        RESPONSES,
        {"input": [{"type": "computer_call"}]},
        "input[0].type",
        "items of this `type` are not supported. Given: 'computer_call' in `input[0].type`",
    ),
    Case(
        responses_rules.TooManyItemsError,
        RESPONSES,
        {"input": [{}] * 10_001},
        "input",
        "`input` must have at most 10000 items, with those before. Given: 10001",
    ),
    Case(
        responses_rules.ItemsSizeError,
        RESPONSES,
        {"input": [{"role": "user", "content": "x" * (1 << 20)}] * 16},
        "input",
        "`input` must have at most 16777216 bytes, with the items before",
        limits=Limits(payload_limit=20 << 20),
    ),
    Case(
        responses_rules.UnknownItemError,
        RESPONSES,
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input[0].id",
        "`input[0].id` names no item of the conversation. Given: 'msg_1'",
    ),
    Case(
        responses_rules.RepeatedItemError,
        "/v1/conversations",
        {"import": {"metadata": {}, "items": [{"id": "a", "role": "user", "content": "x"}] * 2}},
        "import.items[1].id",
        "`import.items[1].id` must be no other item's. Given: 'a'",
    ),
    Case(
        responses_rules.OneOfFieldsError,
        "/v1/conversations",
        {"items": [], "import": {"metadata": {}, "items": []}},
        "import",
        "either `items` or `import` must be set, not both",
    ),
    Case(
        responses_rules.TwoContextsError,
        RESPONSES,
        {"previous_response_id": "resp_1", "conversation": "conv_1"},
        "previous_response_id",
        "`previous_response_id` and `conversation` cannot be used together",
    ),
    Case(
        responses_rules.MetadataError,
        RESPONSES,
        {"metadata": {str(number): "" for number in range(17)}},
        "metadata",
        "`metadata` must have at most 16 keys of at most 64 characters and texts of at most 512",
    ),
]
