"""A prompt of texts and media as tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

from caravan_proto.messages.media import MediaFacts, TokenizedParts
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.media import Media
from caravan_scheduler.core.prompt_media import PromptMedia, cell_numbers


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The tokens of a prompt, in which cells of ``media`` have numbers, no bytes, and count as control tokens.

    ``media``: None if the prompt has text only.
    """

    tokens: TokenizedText
    media: PromptMedia | None


def media_tokens_of(parts: TokenizedParts, media: Iterable[Media], facts: MediaFacts) -> MediaTokens:
    """Return the tokens of ``parts`` of a prompt that has ``media``, as a shard with ``facts`` has counted them."""
    token_ids = list(parts.token_ids)
    for span in parts.media:
        token_ids[span.offset : span.end] = cell_numbers(span, facts.fingerprint)
    found = PromptMedia(
        spans=parts.media,
        contents={medium.id: medium for medium in media},
        encoder=facts.fingerprint,
        atomic=facts.atomic,
    )
    tokens = TokenizedText(tuple(token_ids), parts.pieces, parts.specials)
    return MediaTokens(tokens, found if parts.media else None)
