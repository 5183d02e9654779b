"""OpenAI's rules for completions, with vLLM's extra parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_router.engine.interface import Engine, ModelFacts
from caravan_router.http.candidates import Choices
from caravan_router.http.constraints import compiled, constraint_of_fields
from caravan_router.http.limits import Limits
from caravan_router.http.sampling_openai import biases_of, check_choice_parameters, check_sampling, samplings_of
from caravan_router.http.schema_openai import CompletionRequest
from caravan_router.http.serving import Extras, Serving
from caravan_router.http.validation import (
    Bounds,
    ValidRequest,
    bounds_of,
    check_positive,
    check_range,
    check_stops,
    fit,
    model_of,
    tokenize_prompt,
)
from caravan_router.http.validation_errors import (
    EmptyPromptError,
    IgnoreEosError,
    MixedPromptError,
    PromptTooLongError,
    StreamOptionsError,
    TokenIdError,
    TooManyPromptsError,
    UnsupportedFieldError,
)
from caravan_router.scheduling.params import StoppingParams

DEFAULT_MAX_TOKENS = 16


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPlan:
    """What is to be checked and built together."""

    prompts: Sequence[Prompt]
    choices: Choices
    serving: Serving


async def validate_completion(
    engine: Engine, limits: Limits, request: CompletionRequest, plan: CompletionPlan
) -> list[ValidRequest]:
    """One entry a prompt. Raises ValidationError (one class a rule), NoShardError, TextTooLongError."""
    model = model_of(engine)
    bounds = bounds_of(limits, model)
    _refuse_unbuilt(request)
    check_sampling(request)
    check_choice_parameters(request.choice_parameters, plan.choices.candidates)
    biases = biases_of(request.logit_bias, limits, model)
    check_range("logprobs", request.logprobs, 0, bounds.max_top_n_tokens)
    check_positive("max_tokens", request.max_tokens)
    stops = check_stops([request.stop] if isinstance(request.stop, str) else request.stop or (), limits)
    asked = constraint_of_fields(request, limits)
    if asked is not None and request.ignore_eos:
        raise IgnoreEosError(asked.field)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    fitted = []
    for prompt in plan.prompts:
        token_ids = await _token_ids(engine, model, prompt, bounds)
        fitted.append((prompt, token_ids, fit(token_ids, max_tokens, bounds, ("prompt", "max_tokens"))))
    # Last, since it costs most.
    extras = Extras(constraint=await compiled(engine, asked))
    valid = []
    for prompt, token_ids, max_new in fitted:
        samplings = samplings_of(request, plan.choices.candidates, model, ranked=plan.choices.ranked, biases=biases)
        stopping = StoppingParams(max_new_tokens=max_new, ignore_eos=bool(request.ignore_eos))
        valid.append(
            ValidRequest(
                specs=tuple(plan.serving.spec(token_ids, sampling, stopping, extras) for sampling in samplings),
                stops=stops,
                characters=len(prompt.text) if isinstance(prompt, TextPrompt) else 0,
            )
        )
    return valid


def _refuse_unbuilt(request: CompletionRequest) -> None:
    if request.echo:
        raise UnsupportedFieldError("echo", "set it to false", request.echo)
    if request.suffix:
        raise UnsupportedFieldError("suffix", 'set it to ""', request.suffix)
    if request.stream_options is not None and not request.stream:
        raise StreamOptionsError


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
