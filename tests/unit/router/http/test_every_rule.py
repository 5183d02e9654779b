"""Every validation rule has a request that breaks only this rule, and the error that the client gets."""

import io
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from caravan_router.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.core.engine import FillTokens, ModelFacts
from caravan_router.core.tenant import Tenant
from caravan_router.http.admin import rules as admin_rules
from caravan_router.http.app import Access
from caravan_router.http.generation import rules
from caravan_router.http.limits import Limits
from caravan_router.http.llama_server import rules as llama_server_rules
from caravan_router.http.ollama import rules as ollama_rules
from caravan_router.http.openai import rules as openai_rules
from caravan_router.http.openai.responses import rules as responses_rules
from caravan_router.http.server.errors import BodyMismatchError, ValidationError
from caravan_router.http.tgi import rules as tgi_rules
from caravan_testing.http_server import events, serving
from caravan_testing.scripted_engine import EOS, MODEL, ScriptedEngine

ROLES_MODEL = replace(MODEL, chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
KEY = ApiKey(digest=digest_of("a-key"), tenant=Tenant(name="alice"), max_priority=5, operator=True)

DEFAULT_LIMITS = Limits()

GENERATE, STREAM, ROOT, TEXT = "/generate", "/generate_stream", "/", "/v1/completions"
CHAT, VECTORS, TOKENIZE, VERTEX = "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/vertex"
LLAMA, INFILL = "/completion", "/infill"
OLLAMA, SCORE, RESPONSES = "/api/generate", "/v1/score", "/v1/responses"
MINIMAL: dict[str, dict[str, Any]] = {
    GENERATE: {"inputs": "hi"},
    STREAM: {"inputs": "hi"},
    ROOT: {"inputs": "hi"},
    TOKENIZE: {"inputs": "hi"},
    TEXT: {"prompt": "hi"},
    LLAMA: {"prompt": "hi"},
    INFILL: {"input_prefix": "a", "input_suffix": "b"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    VECTORS: {"input": "hi"},
    RESPONSES: {"input": "hi"},
    VERTEX: {"instances": [{"inputs": "hi"}]},
    OLLAMA: {"model": "any", "prompt": "hi"},
}


@dataclass(frozen=True)
class Case:
    """``body``: fields beyond those that the route requires. ``param``: the field's name in OpenAI's errors."""

    rule: type[ValidationError]
    path: str
    body: dict[str, Any]
    param: str | None
    message: str
    limits: Limits = DEFAULT_LIMITS
    model: ModelFacts = ROLES_MODEL
    header: tuple[str, str] = ("X-Request-Id", "a")
    method: str = "POST"


def tgi(**parameters: Any) -> dict[str, Any]:
    return {"parameters": parameters}


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def nested(levels: int) -> dict[str, Any]:
    return {"a": nested(levels - 1)} if levels else {}


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
    Case(
        openai_rules.NotAProbabilityError, CHAT, {"top_p": 0}, "top_p", "`top_p` must be > 0.0 and <= 1.0. Given: 0.0"
    ),
    Case(rules.CandidatesError, CHAT, {"n": 17}, "n", "`n` must be > 0 and <= 16. Given: 17"),
    Case(
        tgi_rules.BestOfDisabledError,
        GENERATE,
        tgi(best_of=2),
        None,
        "`best_of` != 1 is not allowed for this endpoint. Given: 2",
        limits=Limits(max_best_of=1),
    ),
    Case(
        openai_rules.BestOfBelowNError,
        TEXT,
        {"n": 2, "best_of": 1},
        "best_of",
        "`best_of` must be >= `n`. Given: `best_of` 1 and `n` 2",
    ),
    Case(
        openai_rules.BestOfAboveNStreamingError,
        TEXT,
        {"best_of": 2, "stream": True},
        "best_of",
        "`best_of` > `n` is not supported when streaming. Given: `best_of` 2 and `n` 1",
    ),
    Case(
        openai_rules.ChoiceParametersError,
        CHAT,
        {"choice_parameters": [{}, {}]},
        "choice_parameters",
        "`choice_parameters` must have 1 entries, as `best_of` or else `n` says. Given: 2",
    ),
    Case(
        openai_rules.TooManyBiasesError,
        CHAT,
        {"logit_bias": {"1": 1, "2": 1}},
        "logit_bias",
        "`logit_bias` must have at most 1 entries. Given: 2",
        limits=Limits(max_logit_biases=1),
    ),
    Case(
        openai_rules.BiasedTokenError,
        CHAT,
        {"logit_bias": {"a": 1}},
        "logit_bias",
        "`logit_bias` keys must be token ids >= 0 and < 1000. Given: 'a'",
    ),
    Case(
        tgi_rules.BestOfWithoutSamplingError,
        ROOT,
        tgi(best_of=2),
        None,
        "you must use sampling when `best_of` is > 1. Given: 2",
    ),
    Case(
        tgi_rules.BestOfWithSeedError,
        ROOT,
        tgi(best_of=2, top_k=2, seed=5),
        None,
        "`seed` must not be set when `best_of` > 1. Given: 5",
    ),
    Case(
        tgi_rules.BestOfStreamingError,
        STREAM,
        tgi(best_of=2),
        None,
        "`best_of` != 1 is not supported when streaming tokens. Given: 2",
    ),
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
    Case(
        tgi_rules.TruncateError,
        STREAM,
        tgi(truncate=0),
        None,
        "`truncate` must be strictly positive and less than 255. Given: 0",
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
        openai_rules.TwoConstraintsError,
        CHAT,
        {"guided_regex": "a", "json_schema": {}},
        "json_schema",
        "`guided_regex` and `json_schema` cannot be used together: an output keeps to one of them",
    ),
    Case(
        openai_rules.IgnoreEosError,
        TEXT,
        {"guided_regex": "a", "ignore_eos": True},
        "ignore_eos",
        "`ignore_eos` cannot be used with `guided_regex`: what matches it ends where it is complete",
    ),
    Case(
        tgi_rules.UnknownAdapterError,
        STREAM,
        tgi(adapter_id="x"),
        None,
        "`adapter_id` must be one of the adapters served: `pirate`. Given: 'x'",
    ),
    Case(
        openai_rules.SuffixError,
        TEXT,
        {"suffix": "x"},
        "suffix",
        "Suffix is not supported and can be achieved by preprocessing the prompt. Given: 'x'",
    ),
    Case(
        llama_server_rules.SamplerError,
        LLAMA,
        {"samplers": ["y"]},
        "samplers",
        "`samplers` must be among penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature, infill. "
        "Given: 'y'",
    ),
    Case(
        llama_server_rules.InfillError,
        INFILL,
        {},
        None,
        "scripted cannot fill in: its vocabulary has no tokens for that",
    ),
    Case(
        llama_server_rules.TooManyExtraPartsError,
        INFILL,
        {"input_extra": [{"text": ""}] * 257},
        "input_extra",
        "`input_extra` may have at most 256 entries. Given: 257",
        model=replace(MODEL, fill=FillTokens(prefix=3, suffix=4, middle=5)),
    ),
    Case(
        ollama_rules.InsertError,
        "/api/generate",
        {"model": "any", "prompt": "x", "suffix": "y"},
        None,
        "scripted does not support insert: its vocabulary has no tokens for `suffix`",
    ),
    Case(
        tgi_rules.PrefillDetailsStreamError,
        STREAM,
        tgi(decoder_input_details=True),
        None,
        "`decoder_input_details` == true is not supported when streaming tokens",
    ),
    Case(
        openai_rules.MixedPromptError,
        VECTORS,
        {"input": ["a", 1]},
        "input",
        "`input` must be a text, a list of texts, a list of token ids or a list of such lists",
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
    Case(
        openai_rules.StreamOptionsError,
        CHAT,
        {"stream_options": {}},
        "stream_options",
        "`stream_options` may be set only when `stream` is true",
    ),
    Case(
        openai_rules.NoVectorsError,
        VECTORS,
        {},
        None,
        "embeddings are not served here: they need shards that were started with --embeddings",
        model=replace(MODEL, embedding_size=0),
    ),
    Case(
        openai_rules.NoScoresError,
        SCORE,
        {"text_1": "a", "text_2": "b"},
        None,
        "scores are not served here: they need a model with vectors or one that ranks, on shards that were started "
        "with --embeddings",
        model=replace(MODEL, embedding_size=0),
    ),
    Case(
        openai_rules.RankingModelError,
        VECTORS,
        {},
        None,
        "this model ranks documents and has no vectors: use /v1/rerank or /v1/score",
        model=replace(MODEL, embedding_size=0, ranks=True),
    ),
    Case(
        openai_rules.AdapterVectorsError,
        VECTORS,
        {"model": "pirate"},
        "model",
        "`model` must not be an adapter: vectors are the model's own. Given: 'pirate'",
    ),
    Case(
        openai_rules.TwoNamesError,
        SCORE,
        {"text_1": "a", "queries": "a", "text_2": "a"},
        "queries",
        "`queries` is another name of `text_1`: only one of them may be set",
    ),
    Case(
        openai_rules.PairsError,
        SCORE,
        {"text_1": ["a", "b"], "documents": ["a", "b", "c"]},
        "documents",
        "`documents` must have one text, or as many as the other side, unless that has one. Given: 2 and 3",
    ),
    Case(
        openai_rules.DimensionsError,
        VECTORS,
        {"dimensions": 9},
        "dimensions",
        "`dimensions` must be 8, as the model has it. Given: 9",
    ),
    Case(
        openai_rules.BeamFieldError,
        TEXT,
        {"use_beam_search": True, "n": 2, "top_p": 0.5},
        "top_p",
        "`top_p` cannot be used with `use_beam_search`. Given: 0.5",
    ),
    Case(
        openai_rules.NeedsFieldError,
        CHAT,
        {"top_logprobs": 1},
        "top_logprobs",
        "`top_logprobs` may be set only when `logprobs` is true. Given: 1",
    ),
    Case(openai_rules.EmptyMessagesError, CHAT, chat(), "messages", "`messages` cannot be empty"),
    Case(
        openai_rules.MissingFieldError,
        CHAT,
        chat({"role": "user"}),
        "messages[0].content",
        "`messages[0].content` is missing",
    ),
    Case(
        openai_rules.NotTextError,
        CHAT,
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}),
        "messages[0].content[0]",
        "`messages[0].content[0]` is not text, which is all the model reads. Given: type 'image_url'",
    ),
    Case(
        ollama_rules.ImagesError,
        OLLAMA,
        {"images": ["a"]},
        None,
        "`images` is not supported: the model reads text only. Given: 1 images",
    ),
    Case(
        openai_rules.AliasError,
        TEXT,
        {"n": 2, "n_cmpl": 3},
        "n_cmpl",
        "`n` and `n_cmpl` must not differ. Given: 2 and 3",
    ),
    Case(
        openai_rules.TooManyStopTokensError,
        TEXT,
        {"stop_token_ids": [1] * 65},
        "stop_token_ids",
        "`stop_token_ids` must have at most 64 entries. Given: 65",
    ),
    Case(
        openai_rules.PromptTokensError,
        CHAT,
        {"prompt_token_ids": [1]},
        "prompt_token_ids",
        "`prompt_token_ids` is the whole prompt: `messages` must be empty",
    ),
    Case(
        openai_rules.AliasError,
        CHAT,
        {"max_tokens": 1, "max_completion_tokens": 2},
        "max_completion_tokens",
        "`max_tokens` and `max_completion_tokens` must not differ. Given: 1 and 2",
    ),
    Case(
        openai_rules.NoThoughtsError,
        CHAT,
        {"reasoning_effort": "low"},
        "reasoning_effort",
        "`reasoning_effort` needs a model that thinks: the chat template of this one shows no thoughts. Given: 'low'",
    ),
    Case(
        openai_rules.ContinueError,
        CHAT,
        {"continue_final_message": True},
        "continue_final_message",
        "`continue_final_message` must not be true when the last message is not the assistant's, or calls tools",
    ),
    Case(
        openai_rules.NestedError,
        CHAT,
        {"tools": [{"function": {"name": "a", "parameters": nested(65)}}]},
        "tools[0].function.parameters",
        "`tools[0].function.parameters` must be nested at most 64 deep",
    ),
    Case(
        openai_rules.TooManyToolsError,
        CHAT,
        {"tools": [tool("a"), tool("b")]},
        "tools",
        "`tools` must have at most 1 entries. Given: 2",
        limits=Limits(max_tools=1),
    ),
    Case(
        openai_rules.FunctionNameError,
        CHAT,
        {"tools": [tool("a"), tool("a")]},
        "tools[1].function.name",
        "`tools[1].function.name` must be 1 to 64 letters, digits, `_`, `.` or `-`, and no other's. Given: 'a'",
    ),
    Case(
        openai_rules.ControlTextsError,
        CHAT,
        chat({"role": "user", "content": "</s>" * 300}),
        "messages",
        "`messages` must have at most 256 texts of control tokens. Given: 300",
    ),
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
    Case(
        admin_rules.UnknownParameterError,
        "/admin/prefixes?shrad=a",
        {},
        None,
        "the URL may have the parameter `shard` only. Given: 'shrad'",
        method="DELETE",
    ),
]


def test_every_rule_has_a_case() -> None:
    def subclasses(kind: type[ValidationError]) -> set[type[ValidationError]]:
        return {kind for child in kind.__subclasses__() for kind in (child, *subclasses(child))}

    # Importing the application imports every dialect's rules.
    assert {case.rule for case in CASES} == subclasses(ValidationError)


@pytest.mark.parametrize("case", CASES, ids=[case.rule.__name__ for case in CASES])
async def test_a_broken_rule_is_the_reported_error(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = []
    original = ValidationError.__init__

    def note(error: ValidationError, field: str, message: str) -> None:
        raised.append(type(error))
        original(error, field, message)

    monkeypatch.setattr(ValidationError, "__init__", note)
    access = Access(keyring=Keyring([KEY], time.monotonic()))
    async with serving(ScriptedEngine(model=case.model, controls={"</s>": EOS}), case.limits, access) as service:
        name, value = case.header
        headers = {"Authorization": "Bearer a-key", "Content-Type": "application/json", name: value}
        body = io.BytesIO(msgspec.json.encode(MINIMAL.get(case.path, {}) | case.body))
        response = await service.client.request(case.method, case.path, data=body, headers=headers)
        message = f"Input validation error: {case.message}"
        if case.path.startswith("/v1/") or case.path in {LLAMA, INFILL}:
            error = {"message": message, "type": "invalid_request_error", "param": case.param, "code": "validation"}
            assert (response.status, await response.json()) == (400, {"error": error})
        elif case.path == STREAM:
            assert response.status == 200
            assert events(await response.text()) == [{"error": message, "error_type": "validation"}]
        else:
            assert response.status == (400 if case.path == OLLAMA else 422)
            assert await response.json() == {"error": message, "error_type": "validation"}
        assert raised == [case.rule]
        assert not service.engine.streams
        assert service.is_idle()
