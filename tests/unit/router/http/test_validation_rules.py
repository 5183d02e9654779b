"""Invalid requests with their error messages, and valid ones that are close to a limit."""

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from caravan_dialects.api.error_table import REASON_HEADER
from caravan_dialects.api.limits import Limits
from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_router.http.routes import ROUTES as ALL_ROUTES
from caravan_router.http.server.route import GENERATION_ERRORS
from caravan_scheduler.core.errors import DeadlineError, QueueTimeoutError
from caravan_scheduler.core.generation import ANYONE, GenerationSpec, Tenant
from caravan_testing.http_server import Service, events, serving
from caravan_testing.scripted_engine import CHAT_MODEL, MODEL, ScriptedEngine, Step, word

# Parameters of /generate with their error messages. The prompt has 3 tokens, the context 256.
TGI_RULES = [
    ({"best_of": 0}, "`best_of` must be > 0 and <= 16. Given: 0"),
    ({"best_of": 17, "do_sample": True}, "`best_of` must be > 0 and <= 16. Given: 17"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1. Given: 2"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1. Given: 1"),
    ({"temperature": 0}, "`temperature` must be strictly positive. Given: 0.0"),
    ({"temperature": -1.5}, "`temperature` must be strictly positive. Given: -1.5"),
    ({"temperature": 1e30}, "`temperature` must be >= 0.0 and <= 100.0. Given: 1e+30"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive. Given: 0.0"),
    ({"repetition_penalty": 1e-9}, "`repetition_penalty` must be >= 0.01 and <= 100.0. Given: 1e-09"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0. Given: 2.5"),
    ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0. Given: 0.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0. Given: 1.0"),
    ({"typical_p": 1.5}, "`typical_p` must be > 0.0 and < 1.0. Given: 1.5"),
    ({"top_k": 0}, "`top_k` must be strictly positive. Given: 0"),
    ({"top_k": 2**31}, "`top_k` must be >= 1 and <= 2147483647. Given: 2147483648"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive. Given: 0"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": [""]}, '`stop` must not contain empty strings. Given: ""'),
    ({"stop": ["é" * 129]}, "`stop` sequences must have at most 256 bytes. Given: 258"),
    ({"seed": 2**64}, f"`seed` must be >= 0 and <= {2**64 - 1}. Given: {2**64}"),
    ({"seed": -2}, f"`seed` must be >= 0 and <= {2**64 - 1}. Given: -2"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 255. Given: 0"),
    ({"truncate": 256}, "`truncate` must be strictly positive and less than 255. Given: 256"),
    (
        {"max_new_tokens": 254},
        "`inputs` tokens + `max_new_tokens` must be <= 256. Given: 3 `inputs` tokens and 254 `max_new_tokens`",
    ),
    ({"watermark": True}, "`watermark` is not supported: leave it out, or set it to false. Given: True"),
    *(
        ({"adapter_id": name}, f"`adapter_id` must be one of the adapters served: `pirate`. Given: '{name}'")
        for name in ("x", "", "scripted")
    ),
    ({"grammar": {"type": "regex"}}, "Object missing required field `value` - at `$.parameters.grammar`"),
    ({"grammar": {"type": "lark", "value": "x"}}, "Invalid value 'lark' - at `$.parameters.grammar.type`"),
    ({"grammar": {"value": "x"}}, "Object missing required field `type` - at `$.parameters.grammar`"),
    ({"grammar": {"type": "json", "value": 5}}, "Expected `str | object`, got `int` - at `$.parameters.grammar.value`"),
    ({"grammar": {"type": "json", "value": "{"}}, "grammar is not valid: Input data was truncated"),
    (
        {"grammar": {"type": "regex", "value": "a\\"}},
        "grammar is not valid: it ends with a backslash that escapes nothing",
    ),
    ({"grammar": {"type": "json", "value": {"not": {}}}}, "grammar is not valid: `not`: it cannot be enforced"),
    ({"grammar": {"type": "json", "value": "5"}}, "grammar is not valid: Expected `object`, got `int`"),
    (
        {"grammar": {"type": "json", "value": '{"a":' * 5000 + "1" + "}" * 5000}},
        "grammar is not valid: it is nested too deeply",
    ),
    (
        {"grammar": {"type": "json_schema"}},
        "grammar is not valid: it must have one of `json_schema`, `value` and `schema`",
    ),
    ({"grammar": {"type": "regex", "value": "é" * 32769}}, "`grammar` must have at most 65536 bytes. Given: 65538"),
    # The grammar is checked last.
    (
        {"grammar": {"type": "json", "value": "{"}, "max_new_tokens": 254},
        "`inputs` tokens + `max_new_tokens` must be <= 256. Given: 3 `inputs` tokens and 254 `max_new_tokens`",
    ),
    ({"top_k": 1.5}, "Expected `int | null`, got `float` - at `$.parameters.top_k`"),
    ({"top_k": True}, "Expected `int | null`, got `bool` - at `$.parameters.top_k`"),
    ({"stop": "a"}, "Expected `array | null`, got `str` - at `$.parameters.stop`"),
    # Parameters are checked in TGI's order, and the first error is reported.
    ({"temperature": 0, "top_k": 0}, "`temperature` must be strictly positive. Given: 0.0"),
    ({"top_p": 2.0, "top_k": 0}, "`top_p` must be > 0.0 and < 1.0. Given: 2.0"),
]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}}),
    ("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 1}}),
    ("/", {"inputs": "a", "parameters": {"max_new_tokens": 1}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "n": 2, "stream": True}),
]
_MESSAGES = [{"role": "user", "content": "a"}]
_CHAT = {"messages": _MESSAGES}
_GEMINI: dict[str, Any] = {"contents": [{"parts": [{"text": "a"}]}]}
_GEMINI_REFUSED: tuple[Any, ...] = (
    _GEMINI | {"generationConfig": {"candidateCount": 0}},
    _GEMINI | {"generationConfig": {"temperature": -1}},
    {"contents": []},
)
_GENERATE = {"inputs": "a", "parameters": {"best_of": 0}}


def _error(message: str) -> dict[str, str]:
    return {"error": f"Input validation error: {message}", "error_type": "validation"}


@pytest.mark.parametrize(("parameters", "message"), TGI_RULES)
async def test_tgi_rules(service: Service, parameters: dict[str, Any], message: str) -> None:
    body = {"inputs": "hi", "parameters": parameters}
    for path in ("/generate", "/", "/invocations"):
        response = await service.post(path, body)
        assert response.status == 422
        assert await response.json() == _error(message)
    response = await service.post("/vertex", {"instances": [{"inputs": "a"}, body]})
    assert response.status == 422
    assert await response.json() == _error(message.replace("$.", "$.instances[1]."))
    assert not service.engine.streams


# Streams refuse these parameters before all others are checked.
_STREAM_RULES = {
    "best_of": "`best_of` != 1 is not supported when streaming tokens. Given: {}",
    "decoder_input_details": "`decoder_input_details` == true is not supported when streaming tokens",
}


@pytest.mark.parametrize(
    ("parameters", "message"), [*TGI_RULES, ({"decoder_input_details": True, "temperature": 0}, "")]
)
@pytest.mark.parametrize(
    ("path", "extra"), [("/generate_stream", {}), ("/", {"stream": True}), ("/invocations", {"stream": True})]
)
async def test_tgi_rules_in_a_stream(
    service: Service, path: str, extra: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    """A body of the wrong type is refused by status, invalid content by an event."""
    response = await service.post(path, {"inputs": "hi", "parameters": parameters, **extra})
    if "at `$." in message:
        assert response.status == 422
        assert await response.json() == _error(message)
    else:
        first = next((field for field in _STREAM_RULES if parameters.get(field) is not None), None)
        expected = message if first is None else _STREAM_RULES[first].format(parameters[first])
        assert response.status == 200
        assert events(await response.text()) == [_error(expected)]
    assert not service.engine.streams


TOO_LONG = "`inputs` must have at most 255 tokens, and `inputs` tokens + `max_new_tokens` must be <= 256. Given: 257"


PROMPT_RULES = [
    ("", {}, "`inputs` cannot be empty"),
    ("a" * 256, {}, TOO_LONG),
    ("é" * 5001, {}, "`inputs` must have at most 8192 bytes. Given: 10002"),
    # The parameters are checked before the prompt, and an empty prompt is refused before ``truncate`` applies.
    ("", {"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ("", {"truncate": 0}, "`inputs` cannot be empty"),
    ("a" * 256, {"truncate": 256}, "`truncate` must be strictly positive and less than 255. Given: 256"),
]


@pytest.mark.parametrize(("inputs", "parameters", "message"), PROMPT_RULES)
async def test_prompt_rules(service: Service, inputs: str, parameters: dict[str, Any], message: str) -> None:
    for path in ("/generate", "/"):
        response = await service.post(path, {"inputs": inputs, "parameters": parameters})
        assert response.status == 422
        assert await response.json() == _error(message)
    response = await service.post("/generate_stream", {"inputs": inputs, "parameters": parameters})
    assert events(await response.text()) == [_error(message)]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [("", "`inputs` cannot be empty"), ("é" * 5001, "`inputs` must have at most 8192 bytes. Given: 10002")],
)
async def test_tokenize_rules(service: Service, inputs: str, message: str) -> None:
    response = await service.post("/tokenize", {"inputs": inputs})
    assert response.status == 422
    assert await response.json() == _error(message)


async def test_a_router_whose_limit_of_best_of_is_1(engine: ScriptedEngine) -> None:
    async with serving(engine, Limits(max_best_of=1)) as service:
        body = {"inputs": "a", "parameters": {"best_of": 2, "do_sample": True}}
        response = await service.post("/generate", body)
        assert await response.json() == _error("`best_of` != 1 is not allowed for this endpoint. Given: 2")
        assert (await service.post("/generate", {"inputs": "a", "parameters": {"best_of": 1}})).status == 200


async def test_null_and_neutral_values_are_accepted(service: Service) -> None:
    fields = """best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p do_sample max_new_tokens
        return_full_text stop truncate watermark details decoder_input_details seed top_n_tokens grammar adapter_id"""
    nulls: dict[str, Any] = dict.fromkeys(fields.split())
    assert (await service.post("/generate", {"inputs": "x", "parameters": nulls})).status == 200
    neutral = nulls | {"best_of": 1, "watermark": False, "decoder_input_details": False, "stop": [], "top_n_tokens": 0}
    assert (await service.post("/generate", {"inputs": "x", "parameters": neutral})).status == 200


OPENAI_RULES = [
    ({"n": 0}, "n", "`n` must be > 0 and <= 16. Given: 0"),
    ({"n": 17}, "n", "`n` must be > 0 and <= 16. Given: 17"),
    ({"best_of": 17}, "best_of", "`best_of` must be > 0 and <= 16. Given: 17"),
    ({"best_of": 1, "n": 2}, "best_of", "`best_of` must be >= `n`. Given: `best_of` 1 and `n` 2"),
    (
        {"best_of": 3, "n": 2, "stream": True},
        "best_of",
        "`best_of` > `n` is not supported when streaming. Given: `best_of` 3 and `n` 2",
    ),
    (
        {"n": 2, "choice_parameters": [{}]},
        "choice_parameters",
        "`choice_parameters` must have 2 entries, one for each output. Given: 1",
    ),
    (
        {"choice_parameters": []},
        "choice_parameters",
        "`choice_parameters` must have 1 entries, one for each output. Given: 0",
    ),
    (
        {"n": 2, "choice_parameters": [{}, {"top_p": 2}]},
        "choice_parameters[1].top_p",
        "`choice_parameters[1].top_p` must be > 0.0 and <= 1.0. Given: 2.0",
    ),
    (
        {"n": 2, "choice_parameters": [{}, {"temperature": -1}]},
        "choice_parameters[1].temperature",
        "`choice_parameters[1].temperature` must be strictly positive. Given: -1.0",
    ),
    (
        {"choice_parameters": [{"max_tokens": 1}]},
        "choice_parameters[0].max_tokens",
        "Object contains unknown field `max_tokens` - at `$.choice_parameters[0]`",
    ),
    (
        {"choice_parameters": [{"seed": "x"}]},
        "choice_parameters[0].seed",
        "Expected `int | null`, got `str` - at `$.choice_parameters[0].seed`",
    ),
    (
        {"suffix": "x"},
        "suffix",
        "Suffix is not supported and can be achieved by preprocessing the prompt. Given: 'x'",
    ),
    (
        {"echo": True, "max_tokens": -2},
        "max_tokens",
        "`max_tokens` must be strictly positive. Given: -2",
    ),
    ({"prompt_logprobs": 6}, "prompt_logprobs", "`prompt_logprobs` must be >= 0 and <= 5. Given: 6"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "`prompt_logprobs` must be >= 0 and <= 5. Given: -1"),
    (
        {"prompt_logprobs": 1, "stream": True},
        "prompt_logprobs",
        "`prompt_logprobs` may be set only when `stream` is not true. Given: 1",
    ),
    ({"echo": True, "prompt": []}, "prompt", "`prompt` cannot be empty"),
    ({"echo": True, "prompt": [[]]}, "prompt", "`prompt` cannot be empty"),
    ({"echo": True, "prompt": [1000]}, "prompt", "`prompt` token ids must be >= 0 and < 1000. Given: 1000"),
    ({"echo": True, "prompt": ""}, "prompt", "`prompt` cannot be empty"),
    (
        {"logit_bias": {str(token_id): 1 for token_id in range(301)}},
        "logit_bias",
        "`logit_bias` must have at most 300 entries. Given: 301",
    ),
    *(
        ({"logit_bias": {key: 1}}, "logit_bias", f"`logit_bias` keys must be token ids >= 0 and < 1000. Given: '{key}'")
        for key in ("1000", "-1", "05", "", "x", "1_0", "٣", "9" * 12)
    ),
    (
        {"logit_bias": {"5": 100.5}},
        "logit_bias[5]",
        "`logit_bias[5]` must be >= -100.0 and <= 100.0. Given: 100.5",
    ),
    ({"logit_bias": [5]}, "logit_bias", "Expected `object | null`, got `array` - at `$.logit_bias`"),
    (
        {"guided_json": {}, "guided_regex": "a"},
        "guided_regex",
        "`guided_json` and `guided_regex` cannot be used together: an output can follow only one",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
        "structured_outputs.choice",
        "`response_format` and `structured_outputs.choice` cannot be used together: an output can follow only one",
    ),
    (
        {"structured_outputs": {"json_object": False}},
        "structured_outputs",
        "structured_outputs is not valid: it must have one of its fields",
    ),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "`structured_outputs.structural_tag` is not supported: leave it out, or set it to null. Given: 'x'",
    ),
    *(
        (
            {"guided_choice": choices},
            "guided_choice",
            "guided_choice is not valid: it must have entries, none of them empty",
        )
        for choices in ([], ["a", ""])
    ),
    (
        {"guided_choice": ["a" * 32768, "b" * 32768]},
        "guided_choice",
        "`guided_choice` must have at most 65536 bytes. Given: 65537",
    ),
    (
        {"grammar": "root ::= x", "ignore_eos": True},
        "ignore_eos",
        "`ignore_eos` cannot be used with `grammar`: an output that matches it ends when it is complete",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "Invalid value 'xml' - at `$.response_format.type`"),
    ({"stream_options": {}}, "stream_options", "`stream_options` may be set only when `stream` is true"),
    ({"temperature": -1}, "temperature", "`temperature` must be strictly positive. Given: -1.0"),
    ({"top_p": 0}, "top_p", "`top_p` must be > 0.0 and <= 1.0. Given: 0.0"),
    ({"min_p": 2}, "min_p", "`min_p` must be >= 0.0 and <= 1.0. Given: 2.0"),
    ({"top_k": -2}, "top_k", "`top_k` must be >= -1 and <= 2147483647. Given: -2"),
    ({"presence_penalty": 3}, "presence_penalty", "`presence_penalty` must be >= -2.0 and <= 2.0. Given: 3.0"),
    ({"logprobs": 6}, "logprobs", "`logprobs` must be >= 0 and <= 5. Given: 6"),
    ({"max_tokens": 0}, "max_tokens", "`max_tokens` must be strictly positive. Given: 0"),
    ({"seed": 2**64}, "seed", f"`seed` must be >= {-(2**63)} and <= {2**64 - 1}. Given: {2**64}"),
    ({"stop": ""}, "stop", '`stop` must not contain empty strings. Given: ""'),
    ({"prompt": []}, "prompt", "`prompt` cannot be empty"),
    ({"prompt": [[]]}, "prompt", "`prompt` cannot be empty"),
    ({"prompt": ["a", ""]}, "prompt", "`prompt` cannot be empty"),
    (
        {"prompt": ["a", 1]},
        "prompt",
        "`prompt` must be a text, a list of texts, a list of token ids or a list of such lists",
    ),
    ({"prompt": [-1]}, "prompt", "`prompt` token ids must be >= 0 and < 1000. Given: -1"),
    ({"prompt": [1000]}, "prompt", "`prompt` token ids must be >= 0 and < 1000. Given: 1000"),
    ({"prompt": ["a"] * 33}, "prompt", "Number of prompts exceeds the maximum allowed batch size of 32. Given: 33"),
    ({"top_k": "5"}, "top_k", "Expected `int | null`, got `str` - at `$.top_k`"),
]


@pytest.mark.parametrize(("fields", "param", "message"), OPENAI_RULES)
async def test_openai_rules(service: Service, fields: dict[str, Any], param: str, message: str) -> None:
    """A streamed request is refused by status too, since the stream has not started."""
    body = {"prompt": "hi", "model": "m", **fields}
    streamed = {"stream": True, "stream_options": {}} | body
    for request in (body, streamed) if param != "stream_options" else (body,):
        response = await service.post("/v1/completions", request)
        assert response.status == 400
        assert (await response.json())["error"] == {
            "message": f"Input validation error: {message}",
            "type": "invalid_request_error",
            "param": param,
            "code": "validation",
        }
    response = await service.post("/invocations", body)
    assert response.status == 422
    assert await response.json() == _error(message)
    assert not service.engine.streams


async def test_neutral_values_are_accepted(service: Service) -> None:
    neutral = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "stream_options": None}
    assert (await service.post("/v1/completions", {"prompt": "hi", **neutral})).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 11}),
        ("/generate", {"inputs": "a", "parameters": {"best_of": 4, "do_sample": True, "max_new_tokens": 11}}),
    ],
)
async def test_the_new_tokens_of_all_generations_have_a_common_limit(path: str, body: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(), Limits(max_request_new_tokens=43)) as service:
        response = await service.post(path, body)
        assert response.status in {400, 422}
        assert "times the number of generations must be <= 43 tokens. Given: 44" in await response.text()
        assert not service.engine.streams


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_fields_reach_the_engine(service: Service, path: str, body: dict[str, Any]) -> None:
    fields = {"priority": 7, "timeout": 2.5, "cache_salt": "mine", "session_id": "one"}
    response = await service.post(path, body | fields)
    assert response.status == 200, await response.text()
    await response.text()
    for stream in service.engine.streams:
        spec = stream.spec
        assert (spec.priority, spec.timeout_s, spec.namespace, spec.tenant) == (7, 2.5, "\0mine", ANYONE)
        assert spec.session == "one"


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_defaults_reach_the_engine(service: Service, path: str, body: dict[str, Any]) -> None:
    await (await service.post(path, body)).text()
    spec = service.engine.spec
    assert (spec.priority, spec.timeout_s, spec.namespace, spec.tenant) == (0, math.inf, "\0", ANYONE)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_headers_replace_fields_and_fields_win(service: Service, path: str, body: dict[str, Any]) -> None:
    await (await service.post(path, body, X_Priority="-3", X_Request_Timeout="1.5")).text()
    assert (service.engine.spec.priority, service.engine.spec.timeout_s) == (-3, 1.5)
    both = body | {"priority": 0, "timeout": 9}
    await (await service.post(path, both, X_Priority="-3", X_Request_Timeout="1.5")).text()
    assert (service.engine.spec.priority, service.engine.spec.timeout_s) == (0, 9.0)


@pytest.mark.parametrize(
    ("fields", "headers", "param", "message"),
    [
        ({"priority": 101}, {}, "priority", "`priority` must be >= -100 and <= 100. Given: 101"),
        ({"priority": -101}, {}, "priority", "`priority` must be >= -100 and <= 100. Given: -101"),
        ({"priority": 1.5}, {}, "priority", "Expected `int | null`, got `float` - at `$.priority`"),
        ({"timeout": 0}, {}, "timeout", "`timeout` must be strictly positive. Given: 0.0"),
        ({"cache_salt": ""}, {}, "cache_salt", "`cache_salt` must have 1 to 256 bytes. Given: 0"),
        ({"cache_salt": "é" * 129}, {}, "cache_salt", "`cache_salt` must have 1 to 256 bytes. Given: 258"),
        ({}, {"X_Priority": "101"}, "X-Priority", "`X-Priority` must be >= -100 and <= 100. Given: 101"),
        ({}, {"X_Priority": "high"}, "X-Priority", "header `X-Priority` must be a whole number. Given: 'high'"),
        (
            {"priority": 1},
            {"X_Priority": "1_0"},
            "X-Priority",
            "header `X-Priority` must be a whole number. Given: '1_0'",
        ),
        (
            {},
            {"X_Request_Timeout": "0"},
            "X-Request-Timeout",
            "`X-Request-Timeout` must be strictly positive. Given: 0.0",
        ),
        (
            {"timeout": 1},
            {"X_Request_Timeout": "nan"},
            "X-Request-Timeout",
            "header `X-Request-Timeout` must be seconds as a decimal number. Given: 'nan'",
        ),
    ],
)
async def test_values_out_of_range_are_refused(
    service: Service, fields: dict[str, Any], headers: dict[str, str], param: str, message: str
) -> None:
    response = await service.post("/v1/completions", {"prompt": "a"} | fields, **headers)
    assert response.status == 400
    error = (await response.json())["error"]
    assert (error["param"], error["message"]) == (param, f"Input validation error: {message}")
    response = await service.post("/generate", {"inputs": "a"} | fields, **headers)
    assert response.status == 422
    assert await response.json() == {"error": f"Input validation error: {message}", "error_type": "validation"}
    assert not service.engine.streams


FAILURES = [
    (QueueTimeoutError("no turn within 5 s"), 429, "overloaded", "queue_timeout"),
    (DeadlineError("not done within 1 s"), 504, "deadline_exceeded", "deadline"),
]


@pytest.mark.parametrize(("error", "status", "code", "metric"), FAILURES)
async def test_a_timeout_has_a_status(
    service: Service, error: QueueTimeoutError | DeadlineError, status: int, code: str, metric: str
) -> None:
    service.engine.script = lambda _: [error]
    tgi = await service.post("/generate", {"inputs": "a"})
    openai = await service.post("/v1/completions", {"prompt": "a"})
    assert tgi.status == openai.status == status
    assert (await tgi.json())["error_type"] == (await openai.json())["error"]["code"] == code
    assert str(error) in (await tgi.json())["error"]
    assert tgi.headers.get("Retry-After") == ("1" if status == 429 else None)
    assert tgi.headers[REASON_HEADER] == metric
    assert await service.sample(f'tgi_request_failure{{err="{metric}"}}') == 2


@pytest.mark.parametrize(("error", "status", "code", "metric"), FAILURES)
async def test_a_timeout_in_a_started_stream_is_an_event(
    service: Service, error: QueueTimeoutError | DeadlineError, status: int, code: str, metric: str
) -> None:
    def script(_: GenerationSpec) -> list[Step]:
        return [word("a"), error]

    service.engine.script = script
    *_, last = events(await (await service.post("/generate_stream", {"inputs": "a"})).text())
    assert last["error_type"] == code
    body = {"prompt": "a", "n": 2, "stream": True}
    *_, last, done = events(await (await service.post("/v1/completions", body)).text())
    assert (last["error"]["code"], done) == (code, "[DONE]")
    assert await service.sample(f'tgi_request_failure{{err="{metric}"}}') == 3


_RATED = ApiKey(digest=digest_of("key"), tenant=Tenant(name="rated"), requests_per_minute=1)


# For each route, bodies that are refused at different stages: before the reply is made, and with the model known.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "/generate": (_GENERATE, {"inputs": "a", "parameters": {"temperature": -1}}),
    "/generate_stream": (_GENERATE, {"inputs": "a", "parameters": {"adapter_id": 1}}),
    "/": (_GENERATE, {"inputs": "a", "parameters": {"top_p": 2}, "stream": False}),
    "/v1/completions": ({"prompt": "a", "n": 0}, {"prompt": "a", "temperature": -1}),
    "/v1/chat/completions": (_CHAT | {"n": 0}, _CHAT | {"temperature": -1}),
    "/v1/responses": (
        {"input": "a", "background": True, "store": False},
        {"input": "a", "previous_response_id": "resp_none"},
        {"input": "a", "tools": [{"type": "function", "name": ""}]},
        {"input": "a", "temperature": -1},
    ),
    "/chat/completions": (_CHAT | {"n": 0}, _CHAT | {"temperature": -1}),
    "/responses": ({"input": "a", "background": True, "store": False}, {"input": "a", "temperature": -1}),
    "/v1/messages": (_CHAT | {"max_tokens": 1, "temperature": -1}, _CHAT | {"max_tokens": 0}),
    **{
        f"/{version}/models/{{model}}:{method}": _GEMINI_REFUSED
        for version in ("v1", "v1beta")
        for method in ("generateContent", "streamGenerateContent")
    },
    "/inference/v1/generate": ({"token_ids": []}, {"token_ids": [5], "sampling_params": {"temperature": -1}}),
    "/v1/decisions": (
        {"input": "a", "questions": [{"type": "predicate", "instructions": " "}]},
        {"input": "a", "questions": []},
    ),
    "/completion": ({"prompt": "a", "n_cmpl": 0}, {"prompt": []}, {"prompt": "a", "top_p": 2}),
    "/completions": ({"prompt": "a", "n_cmpl": 0}, {"prompt": "a", "top_p": 2}),
    "/infill": ({"input_prefix": "a", "input_suffix": "b", "n_cmpl": 0}, {"input_prefix": "a", "input_suffix": "b"}),
    "/api/generate": ({"prompt": "a", "options": {"temperature": -1}}, {"prompt": "a", "options": {"num_ctx": 0}}),
    "/api/chat": (_CHAT | {"options": {"temperature": -1}}, _CHAT | {"options": {"num_predict": -9}}),
    "/invocations": ({}, _GENERATE, _CHAT | {"n": 0}, {"prompt": "a", "n": 0}),
    "/vertex": ({"instances": []}, {"instances": [_GENERATE]}, {"instances": [_CHAT | {"temperature": -1}]}),
}


# What no route can read.
_UNREADABLE: tuple[Any, ...] = ([], {"no_such_field": 1, "messages": 1, "instances": 1, "options": 1, "input": 1})


def test_every_generating_route_is_in_the_table() -> None:
    """Those that take forms have tests of their own, in `test_audio`."""
    generating = [route for route in ALL_ROUTES if set(GENERATION_ERRORS) <= set(route.errors) and not route.operator]
    assert {route.path for route in generating if route.form is None} <= set(_REFUSED)


@pytest.mark.parametrize("path", _REFUSED)
async def test_a_refusal_is_a_request_that_failed(service: Service, path: str) -> None:
    service.engine.model = CHAT_MODEL
    for count, body in enumerate((*_REFUSED[path], *_UNREADABLE), 1):
        response = await service.post(path, body)
        # TGI sends some errors as an event of a stream.
        assert 400 <= response.status < 500 or path == "/generate_stream", await response.text()
        assert await service.sample("tgi_request_count") == count, body
        assert await service.sample('tgi_request_failure{err="validation"}') == count, body
    assert not service.engine.streams


@pytest.mark.parametrize("path", _REFUSED)
async def test_a_refusal_costs_the_key_a_request(path: str) -> None:
    for body in (*_REFUSED[path], *_UNREADABLE):
        access = Access(keyring=Keyring([_RATED], time.monotonic()))
        async with serving(ScriptedEngine(model=CHAT_MODEL), access=access) as service:
            first = await service.post(path, body, Authorization="Bearer key")
            assert first.status != 429
            again = await service.post(path, body, Authorization="Bearer key")
            assert again.status == 429, (body, await again.text())
            assert again.headers["Retry-After"]
            assert await service.sample('tgi_request_failure{err="rate_limited"}') == 1
            assert await service.sample("tgi_request_count") == 2


async def test_an_unknown_model_costs_the_key_a_request() -> None:
    engine = ScriptedEngine(expected=("toy",))
    for path, body in (("/generate", {"inputs": "a"}), ("/v1/embeddings", {"input": "a"})):
        access = Access(keyring=Keyring([_RATED], time.monotonic()))
        async with serving(engine, access=access) as service:
            statuses = [
                (await service.post(path, body | {"model": "none"}, Authorization="Bearer key")).status
                for _ in range(2)
            ]
            assert statuses == [404, 429]


async def test_a_refusal_counts_for_the_model_that_the_body_names() -> None:
    engine = ScriptedEngine(others=[ScriptedEngine(model=replace(MODEL, name="other", fingerprint="o" * 16))])
    async with serving(engine) as service:
        await service.post("/v1/completions", {"prompt": "a", "n": 0, "model": "other"})
        await service.post("/v1/completions", {"prompt": "a", "n": 0, "model": "none"})
        assert 'tgi_request_count{model="other"} 1' in (await service.metrics.render()).decode()
        assert await service.sample("tgi_request_count") == 2
