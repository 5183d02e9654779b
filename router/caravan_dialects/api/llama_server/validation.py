"""Translates llama-server's requests into completions."""

import re
import secrets
from collections.abc import Sequence
from typing import Any

from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import clamped, fit, tokenize_plain
from caravan_dialects.api.generation.rules import TooManyBytesError, shown, unsupported_field_error
from caravan_dialects.api.generation.run import ValidRequest
from caravan_dialects.api.limits import Bounds
from caravan_dialects.api.llama_server.prompts import Prompts
from caravan_dialects.api.llama_server.schema import LlamaServerFields, LogitBias
from caravan_dialects.api.openai.choices import Choices
from caravan_dialects.api.openai.completions.schema import CompletionRequest
from caravan_dialects.api.openai.completions.validation import CompletionPlan, validate_completion
from caravan_dialects.api.openai.prompts import TokensPrompt
from caravan_dialects.api.openai.rules import too_many_biases_error
from caravan_dialects.api.openai.schema import SamplingFields
from caravan_proto.messages.sampling import DEFAULTS, RANGES, SAMPLERS, RequestDefaults, defaults_for

_SAMPLING = tuple({*SamplingFields.__struct_fields__} & {*LlamaServerFields.__struct_fields__} - {"seed"})
_DEFAULTS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repeat_last_n": 64,
    "samplers": [*SAMPLERS, "adaptive_p"],
}
# Mirostat decides how many tokens are likely enough.
_DEFAULTS_WITH_MIROSTAT = {name: DEFAULTS[name] for name in ("top_k", "top_p", "min_p")}
_MAX_INT32 = 2**31 - 1
# Added to a logit, it forbids a token: the same as OpenAI's least bias.
_FORBIDDEN = -100.0
_INTEGER = re.compile(r"-?[0-9]+")


async def validate_llama(context: Context, body: LlamaServerFields, prompts: Prompts, n: int) -> Sequence[ValidRequest]:
    """Return an entry for each prompt. Raises ValidationError, NoShardError, TextTooLongError."""
    bounds = context.bounds
    check_range("n_predict", body.n_predict, -1, _MAX_INT32)
    penalty = RANGES["repetition_penalty"]
    check_range("repeat_penalty", body.repeat_penalty, penalty.low, penalty.high)
    check_range("n_probs", body.n_probs, 0, bounds.max_top_n_tokens)
    check_range("n_indent", body.n_indent, 0, _MAX_INT32)
    check_range("t_max_predict_ms", body.t_max_predict_ms, -1, _MAX_INT32)
    max_tokens = min(_new_tokens(body, tokens, bounds) for tokens in prompts.tokens)
    request = CompletionRequest(
        **sampling_of(body, context.model.request_defaults),
        prompt="",
        model=body.model,
        max_tokens=max_tokens,
        n=n,
        stream=body.stream,
        stop=body.stop,
        seed=body.seed,
        ignore_eos=body.ignore_eos,
        logprobs=body.n_probs or None,
        logit_bias=await _biases(context, body.logit_bias),
        grammar=body.grammar,
        json_schema=body.json_schema,
        priority=body.priority,
        timeout=body.timeout,
        cache_salt=secrets.token_hex(8) if body.cache_prompt is False else body.cache_salt,
        session_id=body.session_id,
        speculate=body.speculate,
    )
    plan = CompletionPlan(
        prompts=[TokensPrompt(tokens) for tokens in prompts.tokens], choices=Choices(n=n, candidates=n)
    )
    return await validate_completion(context, request, plan)


def _new_tokens(body: LlamaServerFields, prompt: Sequence[int], bounds: Bounds) -> int:
    # A step over a prompt always ends with a token, even if none is wanted.
    wanted = None if body.n_predict is None else _MAX_INT32 if body.n_predict == -1 else max(1, body.n_predict)
    return fit(prompt, clamped(prompt, wanted, bounds), bounds, ("prompt", "n_predict"))


def sampling_of(body: LlamaServerFields, defaults: RequestDefaults) -> dict[str, Any]:
    """Return the sampling parameters of a request by OpenAI's names.

    ``defaults``: the model's, which prevail over llama-server's.
    """
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    own = defaults_for({**given, "repetition_penalty": body.repeat_penalty}, defaults)
    mirostat = given.get("mirostat", own.get("mirostat"))
    given = _DEFAULTS | (_DEFAULTS_WITH_MIROSTAT if mirostat else {}) | own | given
    return given | {
        # llama-server's greedy temperatures are those that are not above 0.
        "temperature": max(0.0, given["temperature"]),
        "top_k": max(0, given["top_k"]),
        "repetition_penalty": given.get("repetition_penalty", body.repeat_penalty),
    }


async def _biases(context: Context, given: LogitBias) -> dict[str, float] | None:
    """Return the bias of each token by its id, the last one that is given. Raises ValidationError."""
    if given is None:
        return None
    entries = list(given.items()) if isinstance(given, dict) else given
    if len(entries) > context.limits.max_logit_biases:
        raise too_many_biases_error(context.limits.max_logit_biases, len(entries))
    size, limit = sum(len(key.encode()) for key, _ in entries if isinstance(key, str)), context.bounds.max_prompt_bytes
    if size > limit:
        raise TooManyBytesError("logit_bias", limit, size)
    biases: dict[str, float] = {}
    for key, bias in entries:
        if bias is True:
            raise unsupported_field_error(f"logit_bias[{key}]", "set it to a number or to false", bias)
        value = _FORBIDDEN if bias is False else bias
        # In an object all keys are texts.
        if isinstance(key, int) or (isinstance(given, dict) and _INTEGER.fullmatch(key)):
            biases[str(key)] = value
        else:
            tokens = await tokenize_plain(context.engine, f"logit_bias[{shown(key)}]", key, context.bounds)
            biases |= dict.fromkeys(map(str, tokens), value)
    return biases
