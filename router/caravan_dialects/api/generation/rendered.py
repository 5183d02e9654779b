"""A prompt as it would be computed, for those who route requests by their tokens: vLLM's form."""

from collections.abc import Iterable

import msgspec

from caravan_scheduler.core.prompt_media import is_cell


class RenderedTokens(msgspec.Struct, frozen=True):
    """``token_ids``: those of the prompt, without its images and audio."""

    model: str
    token_ids: list[int]


def rendered_tokens(model: str, prompt: Iterable[int]) -> RenderedTokens:
    """Return ``prompt``, which may have cells of media, for clients."""
    return RenderedTokens(model, [token for token in prompt if not is_cell(token)])
