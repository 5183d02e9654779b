"""Decodes the pictures and sounds of a request, within the limits of requests."""

from caravan_dialects.api.generation.context import Context, PromptContext
from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.generation.prompt import check_bytes, tokenize_prompt
from caravan_dialects.api.generation.rules import media_file_error, media_size_error, too_many_media_error
from caravan_dialects.chat.media_marks import with_media
from caravan_dialects.media.problems import MediaFileError
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.media import Media
from caravan_scheduler.core.prompt_media import MediaTokens, is_cell


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
