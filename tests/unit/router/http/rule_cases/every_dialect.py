"""Rules that several dialects share."""

from unit.router.http.rule_cases.case import CHAT, GENERATE, ROOT, TEXT, TOKENIZE, VECTORS, VERTEX, Case, tgi

from caravan_router.http.generation import rules
from caravan_router.http.limits import Limits
from caravan_router.http.server.errors import BodyMismatchError

CASES = [
    Case(
        BodyMismatchError,
        VECTORS,
        {"input": {}},
        "input",
        "Expected `str | array`, got `object` - at `$.input`",
    ),
    Case(
        rules.UnsupportedFieldError,
        GENERATE,
        tgi(watermark=True),
        None,
        "`watermark` is not supported: leave it out, or set it to false. Given: True",
    ),
    Case(
        rules.NotStrictlyPositiveError,
        CHAT,
        {"max_tokens": 0},
        "max_tokens",
        "`max_tokens` must be strictly positive. Given: 0",
    ),
    Case(
        rules.OutOfRangeError,
        CHAT,
        {"logprobs": True, "top_logprobs": 6},
        "top_logprobs",
        "`top_logprobs` must be >= 0 and <= 5. Given: 6",
    ),
    Case(
        rules.NotBetweenZeroAndOneError,
        ROOT,
        tgi(top_p=1),
        None,
        "`top_p` must be > 0.0 and < 1.0. Given: 1.0",
    ),
    Case(rules.CandidatesError, CHAT, {"n": 17}, "n", "`n` must be > 0 and <= 16. Given: 17"),
    Case(
        rules.PriorityError,
        VERTEX,
        {"instances": [{"inputs": "hi", "priority": 6}]},
        None,
        "`priority` may be at most 5 with this API key. Given: 6",
    ),
    Case(
        rules.CacheSaltError, CHAT, {"cache_salt": ""}, "cache_salt", "`cache_salt` must have 1 to 256 bytes. Given: 0"
    ),
    Case(
        rules.HeaderError,
        CHAT,
        {},
        "X-Priority",
        "header `X-Priority` must be a whole number. Given: 'low'",
        header=("X-Priority", "low"),
    ),
    Case(
        rules.TooManyStopsError,
        CHAT,
        {"stop": list("abcde")},
        "stop",
        "`stop` supports up to 4 stop sequences. Given: 5",
    ),
    Case(rules.EmptyStopError, CHAT, {"stop": ""}, "stop", '`stop` must not contain empty strings. Given: ""'),
    Case(
        rules.StopTooLongError,
        CHAT,
        {"stop": "a" * 257},
        "stop",
        "`stop` sequences must have at most 256 bytes. Given: 257",
    ),
    Case(rules.EmptyPromptError, TOKENIZE, {"inputs": ""}, None, "`inputs` cannot be empty"),
    Case(
        rules.TooManyBytesError,
        TOKENIZE,
        {"inputs": "a" * 10_001},
        None,
        "`inputs` must have at most 8192 bytes. Given: 10001",
    ),
    Case(
        rules.PromptTooLongError,
        VECTORS,
        {"input": "a" * 64},
        "input",
        "`input` must have less than 64 tokens. Given: 65",
    ),
    Case(
        rules.TotalTooLongError,
        TEXT,
        {"max_tokens": 254},
        "prompt",
        "`prompt` tokens + `max_tokens` must be <= 256. Given: 3 `prompt` tokens and 254 `max_tokens`",
    ),
    Case(
        rules.TooManyNewTokensError,
        CHAT,
        {"max_tokens": 50, "n": 3},
        "max_tokens",
        "`max_tokens` times the number of generations must be <= 149 tokens. Given: 150",
        limits=Limits(max_request_new_tokens=149),
    ),
    Case(
        rules.InvalidGrammarError,
        CHAT,
        {"guided_choice": []},
        "guided_choice",
        "guided_choice is not valid: it must have entries, none of them empty",
    ),
    Case(
        rules.TooManyPromptsError,
        VERTEX,
        {"instances": [{"inputs": "a"}] * 2},
        None,
        "Number of prompts exceeds the maximum allowed batch size of 1. Given: 2",
        limits=Limits(max_client_batch_size=1),
    ),
    Case(rules.TokenIdError, VECTORS, {"input": [-1]}, "input", "`input` token ids must be >= 0 and < 1000. Given: -1"),
]
