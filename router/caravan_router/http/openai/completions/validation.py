"""OpenAI's rules for completions, with vLLM's extra parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from caravan_router.core.engine import Engine
from caravan_router.core.sampling import StoppingParams
from caravan_router.http.generation.adapters import adapter_of_model
from caravan_router.http.generation.bounds import Bounds, bounds_of, model_of
from caravan_router.http.generation.candidates import Choices
from caravan_router.http.generation.checks import (
    check_new_tokens,
    check_positive,
    check_range,
    check_stops,
    check_token_ids,
    fit,
    tokenize_prompt,
)
from caravan_router.http.generation.constraints import compiled, constraint_of_fields
from caravan_router.http.generation.prompts import Prompt, TextPrompt, TokensPrompt
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.rules import IgnoreEosError, NeedsFieldError, StreamOptionsError, SuffixError
from caravan_router.http.generation.serving import Extras, Serving
from caravan_router.http.limits import Limits
from caravan_router.http.openai.sampling import biases_of, check_choice_parameters, check_sampling, samplings_of
from caravan_router.http.openai.schema import CompletionRequest
from caravan_router.text.prompt_text import PromptText, as_decoded, as_written

DEFAULT_MAX_TOKENS = 16


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
    if request.suffix:
        raise SuffixError(request.suffix)
    if request.stream_options is not None and not request.stream:
        raise StreamOptionsError
    check_sampling(request)
    check_choice_parameters(request.choice_parameters, plan.choices.candidates)
    biases = biases_of(request.logit_bias, limits, model)
    check_range("logprobs", request.logprobs, 0, bounds.max_top_n_tokens)
    check_range("prompt_logprobs", request.prompt_logprobs, 0, bounds.max_top_n_tokens)
    if request.prompt_logprobs is not None and request.stream:
        raise NeedsFieldError("prompt_logprobs", "`stream` is not true", request.prompt_logprobs)
    if not (request.echo and request.max_tokens == 0):
        check_positive("max_tokens", request.max_tokens)
    stops = check_stops([request.stop] if isinstance(request.stop, str) else request.stop or (), limits)
    asked = constraint_of_fields(request, limits)
    if asked is not None and request.ignore_eos:
        raise IgnoreEosError(asked.field)
    # A pass over a prompt ends with a token, also where none is to be shown.
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
    check_new_tokens("max_tokens", len(plan.prompts) * plan.choices.candidates, max_tokens, bounds)
    fitted = []
    for prompt in plan.prompts:
        token_ids, prompt_text = await _tokens(engine, prompt, bounds, shown=_shows_prompt(request))
        max_new = fit(token_ids, max_tokens, bounds, ("prompt", "max_tokens"))
        stopping = StoppingParams(max_new_tokens=max_new, ignore_eos=bool(request.ignore_eos))
        fitted.append((token_ids, stopping, prompt_text))
    # Last, since it costs most.
    extras = Extras(constraint=await compiled(engine, asked), adapter=adapter_of_model(request.model, model))
    valid = []
    for prompt, (token_ids, stopping, prompt_text) in zip(plan.prompts, fitted, strict=True):
        samplings = samplings_of(
            request, plan.choices.candidates, model, alternatives=_alternatives(request, plan.choices), biases=biases
        )
        valid.append(
            ValidRequest(
                specs=tuple(
                    plan.serving.spec(token_ids, sampling, stopping, _scoring(extras, request, index))
                    for index, sampling in enumerate(samplings)
                ),
                stops=stops,
                characters=len(prompt.text) if isinstance(prompt, TextPrompt) else 0,
                prompt_text=prompt_text,
            )
        )
    return valid


def _shows_prompt(request: CompletionRequest) -> bool:
    return bool(request.echo) or request.prompt_logprobs is not None


def _scoring(extras: Extras, request: CompletionRequest, candidate: int) -> Extras:
    """A prompt is scored once for all its candidates, but a stream waits for no other."""
    wanted = request.prompt_logprobs is not None or (bool(request.echo) and request.logprobs is not None)
    return replace(extras, prompt_logprobs=wanted and (candidate == 0 or bool(request.stream)))


def _alternatives(request: CompletionRequest, choices: Choices) -> int | None:
    """Of the prompt's tokens and of the new ones: what is not for the client is left out of the reply."""
    asked = [count for count in (request.logprobs, request.prompt_logprobs) if count is not None]
    # Ranking takes logprobs, whether or not the client is shown any.
    return max(asked, default=0 if choices.ranked else None)


async def _tokens(
    engine: Engine, prompt: Prompt, bounds: Bounds, *, shown: bool
) -> tuple[tuple[int, ...], PromptText | None]:
    match prompt:
        case TextPrompt(text):
            tokenized = await tokenize_prompt(engine, "prompt", text, bounds)
            return tokenized.token_ids, as_written(text, tokenized) if shown else None
        case TokensPrompt(token_ids):
            check_token_ids("prompt", token_ids, bounds.max_input_tokens, model_of(engine))
            return token_ids, as_decoded(await engine.queries.detokenize(token_ids)) if shown else None
