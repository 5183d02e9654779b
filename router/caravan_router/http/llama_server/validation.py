"""Translates llama-server's requests into completions."""

import secrets
from collections.abc import Sequence
from typing import Any

from caravan_router.http.generation.bounds import Bounds
from caravan_router.http.generation.checks import check_range
from caravan_router.http.generation.context import Context
from caravan_router.http.generation.prompt import fit
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.rules import UnsupportedFieldError
from caravan_router.http.generation.seeds import MAX_SEED
from caravan_router.http.llama_server.prompts import Prompts
from caravan_router.http.llama_server.rules import SamplerError
from caravan_router.http.llama_server.schema import LlamaServerFields
from caravan_router.http.openai.completions.schema import CompletionRequest
from caravan_router.http.openai.completions.validation import CompletionPlan, validate_completion
from caravan_router.http.openai.prompts import TokensPrompt
from caravan_router.http.openai.sampling import MAX_WINDOW, MIN_SEED

# Fields that switch a sampler off when it is left out of `samplers`.
_SWITCHED_OFF: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": None, "presence_penalty": None, "frequency_penalty": None},
    "dry": {"dry_multiplier": None},
    "top_n_sigma": {},
    "top_k": {"top_k": None},
    "typ_p": {"typical_p": None},
    "top_p": {"top_p": None},
    "min_p": {"min_p": None},
    "xtc": {"xtc_probability": None},
    "temperature": {"temperature": 1.0},
    "infill": {},
}
_ALIASES = {"typical_p": "typ_p"}
_UNSUPPORTED = (
    "n_cache_reuse", "mirostat", "dynatemp_range", "top_n_sigma", "min_keep", "post_sampling_probs",
    "timings_per_token", "return_progress", "lora",
)  # fmt: skip
# Added to a logit, it forbids a token: the same as OpenAI's least bias.
_FORBIDDEN = -100.0


async def validate_llama(context: Context, body: LlamaServerFields, prompts: Prompts, n: int) -> Sequence[ValidRequest]:
    """Return an entry for each prompt. Raises ValidationError, NoShardError, TextTooLongError."""
    bounds = context.bounds
    for field in _UNSUPPORTED:
        value = getattr(body, field)
        # llama-server switches some of them off with -1.
        if value and value != -1:
            raise UnsupportedFieldError(field, "set it to null", value)
    check_range("n_predict", body.n_predict, -1, MAX_WINDOW)
    check_range("n_probs", body.n_probs, 0, bounds.max_top_n_tokens)
    check_range("n_indent", body.n_indent, 0, MAX_WINDOW)
    check_range("t_max_predict_ms", body.t_max_predict_ms, -1, MAX_WINDOW)
    check_range("seed", body.seed, MIN_SEED, MAX_SEED)
    max_tokens = min(_new_tokens(body, tokens, bounds) for tokens in prompts.tokens)
    request = CompletionRequest(
        **{**_sampling(body), **_left_out(body.samplers)},
        prompt="",
        model=body.model,
        max_tokens=max_tokens,
        n=n,
        stream=body.stream,
        stop=body.stop,
        seed=None if body.seed == -1 else body.seed,
        ignore_eos=body.ignore_eos,
        logprobs=body.n_probs or None,
        logit_bias=_biases(body),
        grammar=body.grammar,
        json_schema=body.json_schema,
        priority=body.priority,
        timeout=body.timeout,
        cache_salt=secrets.token_hex(8) if body.cache_prompt is False else body.cache_salt,
        speculate=body.speculate,
    )
    plan = CompletionPlan(prompts=[TokensPrompt(tokens) for tokens in prompts.tokens], n=n, candidates=n)
    return await validate_completion(context, request, plan)


def _new_tokens(body: LlamaServerFields, prompt: Sequence[int], bounds: Bounds) -> int:
    # A step over a prompt always ends with a token, even if none is wanted.
    wanted = None if body.n_predict in {None, -1} else max(1, body.n_predict or 0)
    return fit(prompt, wanted, bounds, ("prompt", "n_predict"))


def _sampling(body: LlamaServerFields) -> dict[str, Any]:
    temperature = 0.8 if body.temperature is None else body.temperature
    return {
        # llama-server's greedy temperatures are those that are not above 0.
        "temperature": max(0.0, temperature),
        "top_k": 40 if body.top_k is None else max(0, body.top_k),
        "top_p": 0.95 if body.top_p is None else body.top_p,
        "min_p": 0.05 if body.min_p is None else body.min_p,
        "typical_p": body.typical_p,
        "repetition_penalty": body.repeat_penalty,
        "repeat_last_n": 64 if body.repeat_last_n is None else body.repeat_last_n,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "dry_multiplier": body.dry_multiplier,
        "dry_base": body.dry_base,
        "dry_allowed_length": body.dry_allowed_length,
        "dry_penalty_last_n": body.dry_penalty_last_n,
        "xtc_probability": body.xtc_probability,
        "xtc_threshold": body.xtc_threshold,
    }


def _left_out(samplers: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields that switch off every sampler but ``samplers``."""
    if samplers is None:
        return {}
    used = {_ALIASES.get(name, name) for name in samplers}
    for name in samplers:
        if _ALIASES.get(name, name) not in _SWITCHED_OFF:
            raise SamplerError(tuple(_SWITCHED_OFF), name)
    fields: dict[str, Any] = {}
    for name, off in _SWITCHED_OFF.items():
        if name not in used:
            fields |= off
    return fields


def _biases(body: LlamaServerFields) -> dict[str, float] | None:
    if body.logit_bias is None:
        return None
    for token_id, bias in body.logit_bias:
        if bias is True:
            raise UnsupportedFieldError(f"logit_bias[{token_id}]", "set it to a number or to false", bias)
    return {str(token_id): _FORBIDDEN if bias is False else bias for token_id, bias in body.logit_bias}
