"""Tokenizes prompts with their media, and checks that a prompt and its new tokens fit the context."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from caravan_dialects.api.generation.context import Context, PromptContext
from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.generation.rules import (
    PromptTooLongError,
    PromptTooManyBytesError,
    TotalTooLongError,
    empty_prompt_error,
    media_file_error,
    media_size_error,
    no_prompt_embeds_error,
    row_size_error,
    token_id_error,
    too_many_media_error,
    too_many_new_tokens_error,
)
from caravan_dialects.api.limits import Bounds
from caravan_dialects.chat.control_text import with_media
from caravan_dialects.media.file import MediaFile, MediaFileError
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.engine import Engine, ModelFacts
from caravan_scheduler.core.media import Embeddings, Media
from caravan_scheduler.core.prompt_media import MediaTokens, is_cell


async def tokenize_prompt(
    engine: Engine, field: str, text: str, bounds: Bounds, *, add_special: bool = True
) -> TokenizedText:
    """Tokenize ``text``. The number of bytes is checked first, since long texts take long to tokenize."""
    check_bytes(field, text, bounds)
    return await engine.queries.tokenize(text, add_special=add_special)


async def tokenize_texts(engine: Engine, field: str, texts: Sequence[str], bounds: Bounds) -> list[tuple[int, ...]]:
    """Return the token ids of each text."""
    check_texts(field, texts, bounds)
    return await engine.queries.tokenize_texts(texts)


async def tokenize_plain(engine: Engine, field: str, text: str, bounds: Bounds) -> tuple[int, ...]:
    """Tokenize ``text``, which may be empty, without a begin token. The text of a control token stays text."""
    if not text:
        return ()
    check_bytes(field, text, bounds)
    return (await engine.queries.tokenize(text, add_special=False, parse_special=False)).token_ids


def check_texts(field: str, texts: Sequence[str], bounds: Bounds) -> None:
    """Require texts that are neither empty nor too long. Raises ValidationError, which names the text."""
    for index, text in enumerate(texts):
        check_bytes(nth(field, index, len(texts)), text, bounds)


def check_bytes(field: str, text: str, bounds: Bounds) -> None:
    """Require a text that is neither empty nor too long. Raises ValidationError."""
    if not text:
        raise empty_prompt_error(field)
    size = len(text.encode())
    if size > bounds.max_prompt_bytes:
        raise PromptTooManyBytesError(field, bounds.max_prompt_bytes, size, bounds.max_total_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Shortens a text to ``limit`` tokens by removing its end or, with ``keep_end``, its start."""

    limit: int
    keep_end: bool


async def tokenize_truncated(
    engine: Engine, field: str, text: str, bounds: Bounds, truncation: Truncation
) -> TokenizedText:
    """Tokenize ``text`` and shorten it. The tokens that the tokenizer adds stay, as in Hugging Face's tokenizers."""
    whole = await tokenize_prompt(engine, field, text, bounds)
    if len(whole.token_ids) <= truncation.limit:
        return whole
    bare = (await engine.queries.tokenize(text, add_special=False)).token_ids
    added = len(whole.token_ids) - len(bare)
    # Both lists contain the text's own tokens, so all tokens before and after them were added by the tokenizer.
    start = next(start for start in range(added + 1) if whole.token_ids[start : start + len(bare)] == bare)
    end = start + len(bare)
    room = max(0, truncation.limit - added)
    own = range(end - room, end) if truncation.keep_end else range(start, start + room)
    kept = [*range(start), *own, *range(end, len(whole.token_ids))][: truncation.limit]
    return TokenizedText(
        tuple(whole.token_ids[place] for place in kept),
        tuple(whole.pieces[place] for place in kept),
        tuple(whole.specials[place] for place in kept),
    )


def check_prompt_ids(field: str, token_ids: Sequence[int], context: PromptContext) -> None:
    """Require a prompt of token ids of the model's vocabulary, after which there is room for one more."""
    bounds = context.bounds
    if len(token_ids) > bounds.max_input_tokens:
        raise PromptTooLongError(field, bounds.max_input_tokens, len(token_ids), bounds.max_total_tokens)
    check_token_ids(field, token_ids, bounds.max_input_tokens, context.model)


def check_token_ids(field: str, token_ids: Sequence[int], limit: int, model: ModelFacts) -> None:
    """Require 1 to ``limit`` token ids of the model's vocabulary, after which nothing is generated."""
    if not token_ids:
        raise empty_prompt_error(field)
    # The count comes first: there may be a million ids.
    if len(token_ids) > limit:
        raise PromptTooLongError(field, limit, len(token_ids), None)
    for token_id in token_ids:
        if not 0 <= token_id < model.vocabulary_size:
            raise token_id_error(field, model.vocabulary_size, token_id)


def nth(field: str, number: int, count: int) -> str:
    """Return the name of a text of ``field``, which has ``count`` of them."""
    return field if count == 1 else f"{field}[{number}]"


def fit(prompt: Sequence[int], max_new: int | None, bounds: Bounds, names: tuple[str, str]) -> int:
    """Return the number of new tokens: ``max_new``; if it is None, the model's default, or all that fit.

    ``names``: what the client calls the prompt and the number of new tokens.
    """
    field, new_field = names
    if not prompt:
        raise empty_prompt_error(field)
    if max_new is not None and len(prompt) + max_new > bounds.max_total_tokens:
        raise TotalTooLongError(field, new_field, bounds.max_total_tokens, len(prompt), max_new)
    if len(prompt) > bounds.max_input_tokens:
        raise PromptTooLongError(field, bounds.max_input_tokens, len(prompt), bounds.max_total_tokens)
    if max_new is not None:
        return max_new
    room = bounds.max_total_tokens - len(prompt)
    return room if bounds.usual_new_tokens is None else min(room, bounds.usual_new_tokens)


def clamped(prompt: Sequence[int], max_new: int | None, bounds: Bounds) -> int | None:
    """Return the part of ``max_new`` that the context has room for; None if it has none, so that `fit` says so."""
    room = bounds.max_total_tokens - len(prompt)
    return min(max_new, room) if max_new is not None and room > 0 else None


def check_new_tokens(field: str, generations: int, max_new: int, bounds: Bounds) -> None:
    """Require that all ``generations`` of a request together generate no more than the limit.

    ``max_new`` tokens count for each; `fit` refuses what is too much for a single one.
    """
    given = generations * min(max_new, bounds.max_total_tokens)
    if given > bounds.max_request_new_tokens:
        raise too_many_new_tokens_error(field, bounds.max_request_new_tokens, given)


async def decoded(context: PromptContext, parts: MediaParts) -> dict[str, Media]:
    """Return the pictures and sounds of ``parts`` by their marks. Raises ValidationError."""
    limit = context.limits.max_media
    if len(parts.files) > limit:
        raise too_many_media_error(list(parts.files.values())[limit].field, limit, len(parts.files))
    found: dict[str, Media] = {}
    # One after another, so that requests with one picture get their turns between those of this one.
    for mark, named in parts.files.items():
        try:
            medium = await context.decoding.decode(named.file)
        except MediaFileError as error:
            raise media_file_error(named.field, str(error)) from error
        facts = context.model.media
        if facts is not None and medium.size_bytes > facts.max_bytes:
            raise media_size_error(named.field, facts.max_bytes, medium.size_bytes)
        found[mark] = medium
    return found


async def decoded_embeddings(context: Context, field: str, data: str) -> Embeddings:
    """Return the embeddings of a file in base64. Raises ValidationError."""
    file = MediaFile(data, row_size=_input_size(context, field))
    try:
        medium = await context.decoding.decode(file)
    except MediaFileError as error:
        raise media_file_error(field, str(error)) from error
    assert isinstance(medium, Embeddings)
    return medium


async def tokenize_embeddings(context: Context, field: str, embeddings: Embeddings) -> MediaTokens:
    """Return the cells of a prompt of embeddings. Raises ValidationError, NoShardError."""
    size, limit = _input_size(context, field), context.bounds.max_input_tokens
    if embeddings.size != size:
        raise row_size_error(field, size, embeddings.size)
    if embeddings.count > limit:
        raise PromptTooLongError(field, limit, embeddings.count, context.bounds.max_total_tokens)
    facts = context.model.media
    if facts is not None and embeddings.size_bytes > facts.max_bytes:
        raise media_size_error(field, facts.max_bytes, embeddings.size_bytes)
    return await context.engine.queries.tokenize_parts((embeddings,), add_special=False)


def _input_size(context: Context, field: str) -> int:
    """Return how many values the model reads in place of a token. Raises ValidationError if it reads none."""
    facts = context.model.media
    if facts is None or not facts.input_size:
        raise no_prompt_embeds_error(field)
    return facts.input_size


async def tokenize_mixed(context: Context, field: str, text: str, parts: MediaParts | None) -> MediaTokens:
    """Tokenize a text that may have marks of ``parts``. Raises ValidationError, NoShardError, TextTooLongError."""
    if parts is None or not parts.files:
        return MediaTokens(await tokenize_prompt(context.engine, field, text, context.bounds), None)
    check_bytes(field, text, context.bounds)
    return await context.engine.queries.tokenize_parts(with_media([text], await decoded(context, parts)))


def without_media(tokenized: TokenizedText) -> TokenizedText:
    """Return the tokens of the text alone."""
    kept = [at for at, token in enumerate(tokenized.token_ids) if not is_cell(token)]
    return TokenizedText(
        tuple(tokenized.token_ids[at] for at in kept),
        tuple(tokenized.pieces[at] for at in kept),
        tuple(tokenized.specials[at] for at in kept),
    )


class RenderedTokens(msgspec.Struct, frozen=True):
    """``token_ids``: those of the prompt, without its images and audio."""

    model: str
    token_ids: list[int]


def rendered_tokens(model: str, prompt: Iterable[int]) -> RenderedTokens:
    """Return ``prompt``, which may have cells of media, for clients."""
    return RenderedTokens(model, [token for token in prompt if not is_cell(token)])
