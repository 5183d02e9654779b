"""Counts what a prompt has of the cache, of pictures and of sounds, for the usage of a reply."""

import msgspec

from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.openai.schema import PromptTokensDetails
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.media import Picture

_Count = int | msgspec.UnsetType


def media_tokens(spec: GenerationSpec) -> tuple[_Count, _Count]:
    """Return how many tokens of the prompt are those of pictures, and of sounds; unset where there are none."""
    pictures = sounds = 0
    if spec.media is not None:
        for span in spec.media.spans:
            if isinstance(spec.media.contents[span.media_id], Picture):
                pictures += span.count
            else:
                sounds += span.count
    return pictures or msgspec.UNSET, sounds or msgspec.UNSET


def prompt_details(run: Run) -> PromptTokensDetails:
    """Return the details of a prompt whose first choice is ``run``, which computes the prompt for the others."""
    return PromptTokensDetails(run.cached_tokens, *media_tokens(run.spec))
