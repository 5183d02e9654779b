"""Rules of ``/v1/completions``: OpenAI's, with vLLM's extra parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_dialects.ahead import each
from caravan_dialects.api.generation.checks import check_positive, check_range
from caravan_dialects.api.generation.constraints import compiled
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.fill import prompt_before
from caravan_dialects.api.generation.prompt import (
    check_new_tokens,
    check_prompt_ids,
    decoded_embeddings,
    fit,
    tokenize_embeddings,
    tokenize_plain,
    tokenize_prompt,
)
from caravan_dialects.api.generation.rules import too_many_prompts_error
from caravan_dialects.api.generation.run import ValidRequest
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.aliases import UNLIMITED
from caravan_dialects.api.openai.beams import check_beams, with_beams
from caravan_dialects.api.openai.choices import Choices, choices_of
from caravan_dialects.api.openai.completions.schema import CompletionRequest
from caravan_dialects.api.openai.constraints import constraint_of
from caravan_dialects.api.openai.prompts import (
    EmbeddingsPrompt,
    PromptInput,
    TextPrompt,
    TokensPrompt,
    embeddings_prompts,
    split_prompts,
)
from caravan_dialects.api.openai.rules import (
    ignore_eos_error,
    missing_field_error,
    needs_field_error,
    stream_options_error,
    suffix_error,
)
from caravan_dialects.api.openai.sampling import (
    biases_of,
    check_choice_parameters,
    check_sampling,
    samplings_of,
    stopping_of,
    text_options_of,
)
from caravan_dialects.text.detokenize import PromptText, as_decoded, as_written
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.prompt_media import PromptMedia

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPlan:
    """The generations of a request. ``prompt_field``: what the client calls the prompt."""

    prompts: Sequence[PromptInput]
    choices: Choices
    prompt_field: str = "prompt"


@dataclass(frozen=True, slots=True)
class _Tokenized:
    """A prompt. ``text``: if it is shown."""

    token_ids: tuple[int, ...]
    text: PromptText | None = None
    media: PromptMedia | None = None


def completion_plan_of(body: CompletionRequest, limits: Limits, prompt_field: str = "prompt") -> CompletionPlan:
    """Count what a request generates, before permits are taken. Raises ValidationError."""
    prompts = embeddings_prompts("prompt_embeds", body.prompt_embeds)
    # vLLM's clients must send a text, which is empty.
    if body.prompt or not prompts:
        if body.prompt is None:
            raise missing_field_error(prompt_field)
        prompts += split_prompts(prompt_field, body.prompt, limits.max_client_batch_size)
    if len(prompts) > limits.max_client_batch_size:
        raise too_many_prompts_error("prompt_embeds", limits.max_client_batch_size, len(prompts))
    return CompletionPlan(prompts=prompts, choices=choices_of(body, limits), prompt_field=prompt_field)


async def validate_completion(context: Context, body: CompletionRequest, plan: CompletionPlan) -> list[ValidRequest]:
    """Check sampling, then the prompts, then the constraint; return one entry per prompt.

    Raises ValidationError, NoShardError, TextTooLongError.
    """
    limits, model, bounds = context.limits, context.model, context.bounds
    serving = context.serving(body)
    _check_fields(body, plan, context)
    check_beams(body, plan.choices.n, model)
    biases = biases_of(body.logit_bias, limits, model)
    text = text_options_of(body, limits)
    asked = constraint_of(body, limits)
    if asked is not None and body.ignore_eos:
        raise ignore_eos_error(asked.field)
    # A step over a prompt always ends with a token, even if none is shown (``max_tokens`` 0).
    usual = bounds.usual_new_tokens or DEFAULT_MAX_TOKENS
    max_tokens = usual if body.max_tokens is None else max(1, body.max_tokens)
    wanted = None if body.max_tokens == UNLIMITED else max_tokens
    generations = len(plan.prompts) * plan.choices.candidates
    check_new_tokens("max_tokens", generations, wanted or 1, bounds)

    async def tokenized(prompt: PromptInput) -> _Tokenized:
        field = plan.prompt_field
        if isinstance(prompt, EmbeddingsPrompt):
            found, field = await _read(context, prompt), prompt.field
        elif body.suffix:
            found = _Tokenized(await _gap_tokens(context, prompt, body.suffix))
        else:
            found = await _tokens(context, field, prompt, shown=_shows_prompt(body))
        fit(found.token_ids, wanted, bounds, (field, "max_tokens"))
        return found

    prompts = await each(plan.prompts, tokenized)
    if wanted is None:
        # All prompts get as much as the longest one leaves.
        max_tokens = bounds.max_total_tokens - max(len(one.token_ids) for one in prompts)
        check_new_tokens("max_tokens", generations, max_tokens, bounds)
    stopping = stopping_of(body, max_tokens, model)
    # Compiling comes last, since it costs most.
    constraint = await compiled(context.engine, asked)
    return [
        ValidRequest(
            specs=with_beams(
                [
                    GenerationSpec(
                        prompt=one.token_ids,
                        media=one.media,
                        sampling=sampling,
                        stopping=stopping,
                        constraint=constraint,
                        adapter=context.adapter_key,
                        prompt_logprobs=_wants_prompt_logprobs(body, index),
                        **serving,
                    )
                    for index, sampling in enumerate(
                        samplings_of(
                            body, plan.choices.candidates, model, alternatives=_alternatives(body, plan), biases=biases
                        )
                    )
                ],
                body,
                model,
            ),
            text=text,
            characters=len(prompt.text) if isinstance(prompt, TextPrompt) else 0,
            prompt_text=one.text,
        )
        for prompt, one in zip(plan.prompts, prompts, strict=True)
    ]


def _check_fields(body: CompletionRequest, plan: CompletionPlan, context: Context) -> None:
    bounds = context.bounds
    if body.suffix:
        if context.model.fill is None:
            raise suffix_error(body.suffix)
        for field, asked in (("echo", body.echo), ("prompt_logprobs", body.prompt_logprobs is not None)):
            if asked:
                raise needs_field_error(field, "`suffix` is empty", getattr(body, field))
    if any(isinstance(prompt, EmbeddingsPrompt) for prompt in plan.prompts):
        for field in ("suffix", "echo", "prompt_logprobs"):
            given = getattr(body, field)
            if given or (field == "prompt_logprobs" and given is not None):
                raise needs_field_error(field, "`prompt_embeds` is empty", given)
    if body.stream_options is not None and not body.stream:
        raise stream_options_error()
    check_sampling(body)
    check_choice_parameters(body.choice_parameters, plan.choices.candidates)
    check_range("logprobs", body.logprobs, 0, bounds.max_top_n_tokens)
    check_range("prompt_logprobs", body.prompt_logprobs, 0, bounds.max_top_n_tokens)
    if body.prompt_logprobs is not None and body.stream:
        raise needs_field_error("prompt_logprobs", "`stream` is not true", body.prompt_logprobs)
    if body.max_tokens != UNLIMITED and not (body.echo and body.max_tokens == 0):
        check_positive("max_tokens", body.max_tokens)


def _shows_prompt(body: CompletionRequest) -> bool:
    return bool(body.echo) or body.prompt_logprobs is not None


def _wants_prompt_logprobs(body: CompletionRequest, candidate: int) -> bool:
    """Ask for prompt logprobs once per prompt; a stream asks for each candidate, so that none waits for another."""
    wanted = body.prompt_logprobs is not None or (bool(body.echo) and body.logprobs is not None)
    return wanted and (candidate == 0 or bool(body.stream))


def _alternatives(body: CompletionRequest, plan: CompletionPlan) -> int | None:
    """Return how many alternatives each token has; None for no logprobs at all.

    Prompt and new tokens have the same number; the reply shows what was asked for. Ranking needs logprobs too.
    """
    asked = [count for count in (body.logprobs, body.prompt_logprobs) if count is not None]
    return max(asked, default=0 if plan.choices.ranked else None)


async def _read(context: Context, prompt: EmbeddingsPrompt) -> _Tokenized:
    rows = prompt.rows
    embeddings = await decoded_embeddings(context, prompt.field, rows) if isinstance(rows, str) else rows
    found = await tokenize_embeddings(context, prompt.field, embeddings)
    return _Tokenized(found.tokens.token_ids, media=found.media)


async def _gap_tokens(context: Context, prompt: TextPrompt | TokensPrompt, suffix: str) -> tuple[int, ...]:
    """Return the prompt for the text between ``prompt`` and ``suffix``."""
    if isinstance(prompt, TokensPrompt):
        check_prompt_ids("prompt", prompt.token_ids, context)
        before = prompt.token_ids
    else:
        before = await tokenize_plain(context.engine, "prompt", prompt.text, context.bounds)
    return await prompt_before(context, before, suffix)


async def _tokens(context: Context, field: str, prompt: TextPrompt | TokensPrompt, *, shown: bool) -> _Tokenized:
    match prompt:
        case TextPrompt(text):
            tokenized = await tokenize_prompt(context.engine, field, text, context.bounds)
            return _Tokenized(tokenized.token_ids, as_written(text, tokenized) if shown else None)
        case TokensPrompt(token_ids):
            check_prompt_ids(field, token_ids, context)
            shown_text = as_decoded(await context.engine.queries.detokenize(token_ids)) if shown else None
            return _Tokenized(token_ids, shown_text)
