"""A small model with a projector whose pictures spell words, and a prompt for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.media import MediaKind, MediaShape
from caravan_testing.media_prompts import MediaPrompt, Medium, media_prompt
from caravan_testing.shard_models import ModelDriver
from caravan_testing.shard_tiny_llama import write_tiny_llama
from caravan_testing.spelling_projector import CELLS, PATCH, SIDE, Speller, write_spelling_projector

_BYTES = range(3, 259)
BEFORE, BETWEEN, AFTER = [1, 60, 61, 62], [90, 91], [70, 71, 72]
FIRST, SECOND = [range(40 + CELLS)[-CELLS:], range(140 + CELLS)[-CELLS:]]
WORDS = [*BEFORE, *FIRST, *BETWEEN, *SECOND, *AFTER]


class SpellingModel:
    """A model, its projector, and pictures for it."""

    def __init__(self, folder: Path) -> None:
        self.model = write_tiny_llama(folder / "tiny.gguf")
        self.speller: Speller = write_spelling_projector(folder / "mmproj-tiny.gguf", self.model, _BYTES)

    def picture(self, tokens: Sequence[int]) -> Medium:
        """Return a picture that spells `CELLS` tokens."""
        side = SIDE * PATCH
        shape = MediaShape(media_id=bytes(tokens), kind=MediaKind.IMAGE, width=side, height=side)
        return Medium(shape, self.speller.picture(tokens).tobytes())

    def driver(self, layout: KvLayout, **flags: Any) -> ModelDriver:
        """Return a shard with the model, which its caller closes."""
        return ModelDriver(self.model, **{"ctx_size": 2048, "kv_layout": layout.value, **flags})

    def prompt(self, driver: ModelDriver, *, encodes: bool = True) -> MediaPrompt:
        """Return the prompt `WORDS`, of which pictures spell two parts."""
        first, second = self.picture(FIRST), self.picture(SECOND)
        return media_prompt(driver, BEFORE, first, BETWEEN, second, AFTER, encodes=encodes)
