"""Turns calls of this package into valid requests, by the rules of the HTTP API."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

from caravan import errors
from caravan.embeddings import check_values
from caravan.prompts import ChatCall, Messages, PlainPrompt
from caravan.python_names import in_python
from caravan.request_bodies import chat_body, completion_body
from caravan.sampling_params import SamplingParams
from caravan_dialects.ahead import ahead, each
from caravan_dialects.api.errors import ContextLengthError, RequestError
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import check_token_ids, tokenize_prompt
from caravan_dialects.api.generation.run import ValidRequest
from caravan_dialects.api.openai.chat.truncation import validate_chat
from caravan_dialects.api.openai.chat.validation import ChatSource, ValidChat
from caravan_dialects.api.openai.choices import Choices, choices_of
from caravan_dialects.api.openai.completions.validation import (
    CompletionPlan,
    completion_plan_of,
    validate_completion,
)
from caravan_dialects.api.openai.prompts import EmbeddingsPrompt
from caravan_scheduler.core.errors import DeadlineError, EngineError, TextTooLongError
from caravan_scheduler.core.media import Embeddings

# A tokenizer makes at most one token of each byte, and adds a few for the begin and the end of a text.
_MOST_ADDED_TOKENS = 8
# Stands for a prompt that need not be tokenized to check its parameters.
_ANY_PROMPT = (0,)


async def valid_completions(
    context: Context, prompts: Sequence[PlainPrompt], params: Sequence[SamplingParams]
) -> AsyncGenerator[ValidRequest, None]:
    """Check all prompts with their parameters; return what tokenizes them, a few ahead, and yields their requests.

    What is so short that it fits in any tokens is checked without them, so that of many such prompts the first can run
    before the last is tokenized. Raises RequestError for the earliest prompt that breaks a rule.
    """
    tokenized: dict[int, ValidRequest] = {}

    async def valid(number: int, prompt: PlainPrompt) -> ValidRequest:
        with named_errors("" if len(prompts) == 1 else f"prompt {number}: "):
            return await valid_completion(context, prompt, params[number])

    async def check(number: int) -> None:
        if _fits(context, prompts[number], params[number]):
            await valid(number, _ANY_PROMPT)
        else:
            tokenized[number] = await valid(number, prompts[number])

    async def request(number: int) -> ValidRequest:
        return tokenized.pop(number, None) or await valid(number, prompts[number])

    checked = set[int]()
    unsure = list[int]()
    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        # All prompts of a list mostly share one object.
        if id(own) not in checked or not _fits(context, prompt, own):
            unsure.append(number)
            checked.add(id(own))
    await each(unsure, check)
    return ahead(range(len(prompts)), request)


def _fits(context: Context, prompt: PlainPrompt, params: SamplingParams) -> bool:
    """Return whether a prompt surely fits, though its tokens are not known."""
    new_tokens = 1 if params.max_tokens is None else params.max_tokens
    if not isinstance(prompt, str) or not prompt or not isinstance(new_tokens, int):
        return False
    size, bounds = len(prompt.encode()), context.bounds
    room = min(bounds.max_input_tokens, bounds.max_total_tokens - new_tokens)
    return size <= bounds.max_prompt_bytes and size + _MOST_ADDED_TOKENS <= room


async def valid_completion(context: Context, prompt: PlainPrompt, params: SamplingParams) -> ValidRequest:
    """Raises RequestError of this package or of the router, and EngineError."""
    context.check_generates()
    if params.max_tokens is None:
        max_tokens = max(1, context.bounds.max_total_tokens - await _length(context, prompt))
    else:
        max_tokens = params.max_tokens
    body = completion_body(prompt, params, max_tokens)
    if isinstance(prompt, Embeddings):
        await asyncio.to_thread(check_values, "`prompt_embeds`", prompt.data)
        plan = CompletionPlan(
            prompts=[EmbeddingsPrompt("prompt_embeds", prompt)], choices=choices_of(body, context.limits)
        )
    else:
        plan = completion_plan_of(body, context.limits)
    (request,) = await validate_completion(context, body, plan)
    return request


async def _length(context: Context, prompt: PlainPrompt) -> int:
    """Return how many tokens a prompt has."""
    match prompt:
        case str():
            return len((await tokenize_prompt(context.engine, "prompt", prompt, context.bounds)).token_ids)
        case Embeddings():
            return prompt.count
        case _:
            return len(prompt)


def choices_in(request: ValidRequest, params: SamplingParams) -> Choices:
    """Return which of the generations of a valid request are returned."""
    candidates = len(request.specs)
    return Choices(n=candidates if params.best_of is None else params.n, candidates=candidates)


async def valid_chats(
    context: Context, conversations: Sequence[Messages], params: Sequence[SamplingParams], call: ChatCall
) -> list[ValidChat]:
    """Render, tokenize and check all conversations. Raises RequestError for the earliest that breaks a rule."""

    async def valid(number: int) -> ValidChat:
        with named_errors("" if len(conversations) == 1 else f"conversation {number}: "):
            return await valid_chat(context, conversations[number], params[number], call)

    return await each(range(len(conversations)), valid)


async def valid_chat(context: Context, messages: Messages, params: SamplingParams, call: ChatCall) -> ValidChat:
    """Raises RequestError of this package or of the router, and EngineError."""
    context.check_generates()
    body = chat_body(messages, params, call.fields)
    source = ChatSource(body=body, exact=call.exact or (), clamps=call.exact is not None)
    return await validate_chat(context, source, choices_of(body, context.limits), before=call.before)


async def embedded_ids(context: Context, prompt: PlainPrompt) -> tuple[int, ...]:
    """Return the token ids of a text to embed. Raises the router's RequestError, and EngineError."""
    if isinstance(prompt, str):
        prompt = (await tokenize_prompt(context.engine, "input", prompt, context.bounds)).token_ids
    if isinstance(prompt, Embeddings):
        raise errors.RequestError("what is embedded is a text or token ids, and no embeddings")
    check_token_ids("input", prompt, context.model.max_embed_tokens, context.model)
    return prompt


@contextmanager
def named_errors(prefix: str = "") -> Iterator[None]:
    """Turn the errors of the router's layers into those of this package."""
    try:
        yield
    except (RequestError, TextTooLongError) as error:
        too_long = isinstance(error, ContextLengthError | TextTooLongError)
        kind = errors.ContextLengthError if too_long else errors.RequestError
        raise kind(prefix + in_python(str(error).removeprefix("Input validation error: "))) from None
    except errors.RequestError as error:
        raise type(error)(f"{prefix}{error}") from None
    except DeadlineError as error:
        raise errors.DeadlineError(str(error)) from None
    except EngineError as error:
        raise errors.GenerationError(str(error)) from None
