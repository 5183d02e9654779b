"""OpenAI's rules for completions, with vLLM's extra parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_router.engine.interface import Engine, GenerationSpec, ModelFacts
from caravan_router.http.limits import Limits
from caravan_router.http.schema_openai import CompletionRequest
from caravan_router.http.validation import (
    MAX_SEED,
    MAX_TOP_K,
    Bounds,
    ValidRequest,
    bounds_of,
    check_max_new,
    check_range,
    check_repetition_penalty,
    check_stops,
    check_temperature,
    draw_seed,
    effective_temperature,
    fit,
    model_of,
    tokenize_prompt,
)
from caravan_router.http.validation_errors import (
    EmptyPromptError,
    MixedPromptError,
    NotAProbabilityError,
    PromptTooLongError,
    StreamOptionsError,
    TokenIdError,
    TooManyPromptsError,
    UnsupportedFieldError,
)
from caravan_router.scheduling.params import SamplingParams, StoppingParams

DEFAULT_MAX_TOKENS = 16
MIN_SEED = -(2**63)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    token_ids: tuple[int, ...]


Prompt = TextPrompt | TokensPrompt


def split_prompts(prompt: str | Sequence[str | int | list[int]], limits: Limits) -> list[Prompt]:
    """One entry a prompt, before anything is tokenized. Raises ValidationError."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise EmptyPromptError("prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [TokensPrompt(tuple(ids))]
    prompts: list[Prompt] = []
    kinds = set()
    for item in prompt:
        kinds.add(type(item))
        if isinstance(item, str):
            prompts.append(TextPrompt(item))
        elif isinstance(item, list):
            prompts.append(TokensPrompt(tuple(item)))
    if len(kinds) > 1:
        raise MixedPromptError
    if len(prompts) > limits.max_client_batch_size:
        raise TooManyPromptsError(limits.max_client_batch_size, len(prompts))
    return prompts


async def validate_completion(
    engine: Engine, limits: Limits, request: CompletionRequest, prompts: Sequence[Prompt]
) -> list[ValidRequest]:
    """One generation a prompt. Raises ValidationError (one class a rule), NoShardError, TextTooLongError."""
    model = model_of(engine)
    bounds = bounds_of(limits, model)
    _refuse_unbuilt(request)
    _check_sampling(request, bounds)
    check_max_new("max_tokens", request.max_tokens)
    stops = check_stops([request.stop] if isinstance(request.stop, str) else request.stop or (), limits)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    valid = []
    for prompt in prompts:
        token_ids = await _token_ids(engine, model, prompt, bounds)
        sampling, seed = _sampling(request, model)
        stopping = StoppingParams(
            max_new_tokens=fit(token_ids, max_tokens, bounds, ("prompt", "max_tokens")),
            ignore_eos=bool(request.ignore_eos),
        )
        valid.append(
            ValidRequest(
                spec=GenerationSpec(prompt=token_ids, sampling=sampling, stopping=stopping),
                stops=stops,
                seed=seed,
                characters=len(prompt.text) if isinstance(prompt, TextPrompt) else 0,
            )
        )
    return valid


def _refuse_unbuilt(request: CompletionRequest) -> None:
    for field, number in (("n", request.n), ("best_of", request.best_of)):
        if number not in {None, 1}:
            raise UnsupportedFieldError(field, "set it to 1", number)
    if request.echo:
        raise UnsupportedFieldError("echo", "set it to false", request.echo)
    if request.suffix:
        raise UnsupportedFieldError("suffix", 'set it to ""', request.suffix)
    if request.logit_bias:
        raise UnsupportedFieldError("logit_bias", "set it to {}", request.logit_bias)
    if request.stream_options is not None and not request.stream:
        raise StreamOptionsError


def _check_sampling(request: CompletionRequest, bounds: Bounds) -> None:
    check_temperature(request.temperature, zero_allowed=True)
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise NotAProbabilityError("top_p", request.top_p)
    check_range("min_p", request.min_p, 0.0, 1.0)
    # vLLM writes "off" as -1 or 0.
    check_range("top_k", request.top_k, -1, MAX_TOP_K)
    check_repetition_penalty(request.repetition_penalty)
    check_range("frequency_penalty", request.frequency_penalty, -2.0, 2.0)
    check_range("presence_penalty", request.presence_penalty, -2.0, 2.0)
    check_range("seed", request.seed, MIN_SEED, MAX_SEED)
    check_range("logprobs", request.logprobs, 0, bounds.max_top_n_tokens)


async def _token_ids(engine: Engine, model: ModelFacts, prompt: Prompt, bounds: Bounds) -> tuple[int, ...]:
    match prompt:
        case TextPrompt(text):
            return await tokenize_prompt(engine, "prompt", text, bounds)
        case TokensPrompt(token_ids):
            # Before each is looked at: there may be a million.
            if len(token_ids) > bounds.max_input_tokens:
                raise PromptTooLongError("prompt", bounds.max_input_tokens, len(token_ids))
            for token_id in token_ids:
                if not 0 <= token_id < model.vocabulary_size:
                    raise TokenIdError(model.vocabulary_size, token_id)
            return token_ids


def _sampling(request: CompletionRequest, model: ModelFacts) -> tuple[SamplingParams, int | None]:
    temperature = effective_temperature(1.0 if request.temperature is None else request.temperature)
    seed = None
    if temperature > 0:
        # A signed seed is the same 64 bits.
        seed = draw_seed() if request.seed is None else request.seed & MAX_SEED
    sampling = SamplingParams(
        temperature=temperature,
        top_k=min(max(request.top_k or 0, 0), model.vocabulary_size),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        seed=seed or 0,
        logprobs=request.logprobs is not None,
        top_n_tokens=request.logprobs or 0,
    )
    return sampling, seed
