"""Rules that several dialects share."""

from dataclasses import replace
from typing import Any

from unit.router.http.rule_cases.case import (
    CHAT,
    DETOKENIZE,
    GENERATE,
    OLLAMA,
    ROLES_MODEL,
    ROOT,
    TOKENIZE,
    VECTORS,
    VERTEX,
    Case,
    chat,
    tgi,
)

from caravan_dialects.api.errors import BodyMismatchError
from caravan_dialects.api.generation import rules
from caravan_dialects.api.limits import Limits
from caravan_testing.scripted_engine import MEDIA, SEEING_MODEL
from caravan_testing.seen_prompts import data_url

_PLACE = "messages[0].content[0].image_url.url"


def _picture(url: str) -> dict[str, Any]:
    return chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})


CASES = [
    Case(
        BodyMismatchError,
        VECTORS,
        {"input": {}},
        "input",
        "Expected `str | array`, got `object` - at `$.input`",
    ),
    Case(
        rules.embedding_model_error,
        CHAT,
        {},
        None,
        "'scripted' cannot generate text, it only embeds texts: use /v1/embeddings",
        model=replace(ROLES_MODEL, generates=False),
    ),
    Case(
        rules.unsupported_field_error,
        GENERATE,
        tgi(watermark=True),
        None,
        "`watermark` is not supported: leave it out, or set it to false. Given: True",
    ),
    Case(
        rules.not_strictly_positive_error,
        CHAT,
        {"max_tokens": 0},
        "max_tokens",
        "`max_tokens` must be strictly positive. Given: 0",
    ),
    Case(
        rules.out_of_range_error,
        CHAT,
        {"logprobs": True, "top_logprobs": 6},
        "top_logprobs",
        "`top_logprobs` must be >= 0 and <= 5. Given: 6",
    ),
    Case(
        rules.not_between_zero_and_one_error,
        ROOT,
        tgi(top_p=1),
        None,
        "`top_p` must be > 0.0 and < 1.0. Given: 1.0",
    ),
    Case(rules.candidates_error, CHAT, {"n": 17}, "n", "`n` must be > 0 and <= 16. Given: 17"),
    Case(
        rules.priority_error,
        VERTEX,
        {"instances": [{"inputs": "hi", "priority": 6}]},
        None,
        "`priority` may be at most 5 with this API key. Given: 6",
    ),
    Case(
        rules.cache_salt_error,
        CHAT,
        {"cache_salt": ""},
        "cache_salt",
        "`cache_salt` must have 1 to 256 bytes. Given: 0",
    ),
    Case(
        rules.session_id_error,
        CHAT,
        {"session_id": ""},
        "session_id",
        "`session_id` must have 1 to 256 printable characters. Given: 0",
    ),
    Case(
        rules.header_error,
        CHAT,
        {},
        "X-Priority",
        "header `X-Priority` must be a whole number. Given: 'low'",
        header=("X-Priority", "low"),
    ),
    Case(
        rules.too_many_stops_error,
        CHAT,
        {"stop": ["a"] * 65},
        "stop",
        "`stop` supports up to 64 stop sequences. Given: 65",
    ),
    Case(rules.empty_stop_error, CHAT, {"stop": ""}, "stop", '`stop` must not contain empty strings. Given: ""'),
    Case(
        rules.stop_too_long_error,
        CHAT,
        {"stop": "a" * 257},
        "stop",
        "`stop` sequences must have at most 256 bytes. Given: 257",
    ),
    Case(rules.empty_prompt_error, TOKENIZE, {"inputs": ""}, None, "`inputs` cannot be empty"),
    Case(
        rules.PromptTooManyBytesError,
        TOKENIZE,
        {"inputs": "a" * 10_001},
        None,
        "`inputs` must have at most 8192 bytes. Given: 10001",
    ),
    Case(
        rules.TooManyBytesError,
        GENERATE,
        tgi(grammar={"type": "regex", "value": "a" * 65537}),
        None,
        "`grammar` must have at most 65536 bytes. Given: 65537",
    ),
    Case(
        rules.PromptTooLongError,
        DETOKENIZE,
        {"tokens": [5] * 8193},
        None,
        "`tokens` must have at most 8192 tokens. Given: 8193",
    ),
    Case(
        rules.TotalTooLongError,
        GENERATE,
        tgi(max_new_tokens=254),
        None,
        "`inputs` tokens + `max_new_tokens` must be <= 256. Given: 3 `inputs` tokens and 254 `max_new_tokens`",
    ),
    Case(
        rules.too_many_new_tokens_error,
        CHAT,
        {"max_tokens": 50, "n": 3},
        "max_tokens",
        "`max_tokens` times the number of generations must be <= 149 tokens. Given: 150",
        limits=Limits(max_request_new_tokens=149),
    ),
    Case(
        rules.invalid_grammar_error,
        CHAT,
        {"guided_choice": []},
        "guided_choice",
        "guided_choice is not valid: it must have entries, none of them empty",
    ),
    Case(
        rules.too_many_prompts_error,
        VERTEX,
        {"instances": [{"inputs": "a"}] * 2},
        None,
        "Number of prompts exceeds the maximum allowed batch size of 1. Given: 2",
        limits=Limits(max_client_batch_size=1),
    ),
    Case(
        rules.not_text_error,
        CHAT,
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}),
        "messages[0].content[0]",
        "`messages[0].content[0]` must be text: the model does not read images. Given: type 'image_url'",
    ),
    Case(
        rules.not_text_error,
        OLLAMA,
        {"images": ["a"]},
        None,
        "`images[0]` must be text: the model does not read images. Given: type 'image'",
    ),
    Case(
        rules.token_id_error, VECTORS, {"input": [-1]}, "input", "`input` token ids must be >= 0 and < 1000. Given: -1"
    ),
    Case(
        rules.data_url_error,
        CHAT,
        _picture("http://x/a.png"),
        _PLACE,
        f"`{_PLACE}` must be a URL of the form `data:image/png;base64,…`, which contains the image: nothing is "
        "fetched. Given: 'http://x/a.png'",
        model=SEEING_MODEL,
    ),
    Case(
        rules.media_file_error,
        CHAT,
        _picture("data:;base64,AAAA"),
        _PLACE,
        f"`{_PLACE}` must be a PNG, JPEG, WebP or GIF file",
        model=SEEING_MODEL,
    ),
    Case(
        rules.media_size_error,
        CHAT,
        _picture(data_url()),
        _PLACE,
        f"`{_PLACE}` must have at most 9 bytes when it is decoded. Given: 1728",
        model=replace(SEEING_MODEL, media=replace(MEDIA, max_bytes=9)),
    ),
    Case(
        rules.too_many_media_error,
        CHAT,
        _picture(data_url()),
        _PLACE,
        f"`{_PLACE}`: a request may have at most 0 images and audio files. Given: 1",
        model=SEEING_MODEL,
        limits=Limits(max_media=0),
    ),
]
