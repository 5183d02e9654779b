"""A small model and projector of each kind: positions in a grid, cells that see each other, varying sizes, sound."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.media import MediaKind, MediaShape
from caravan_testing.media_prompts import MediaPrompt, Medium, media_prompt
from caravan_testing.random_projectors import (
    spelled_sound,
    write_gemma_projector,
    write_grid_projector,
    write_sound_projector,
    write_varying_projector,
)
from caravan_testing.shard_models import ModelDriver
from caravan_testing.shard_tiny_delta import write_tiny_delta
from caravan_testing.shard_tiny_gemma import write_tiny_gemma
from caravan_testing.shard_tiny_llama import write_tiny_llama
from caravan_testing.shard_tiny_mrope import write_tiny_mrope

_BYTES = tuple(range(3, 259))
_SIZE = 64
TEXTS = "What is this? ", " And that? ", " It is"


@dataclass(frozen=True)
class Kind:
    """``shifts``: a medium takes fewer positions than cells."""

    name: str
    write_model: Callable[[Path], Path]
    write_projector: Callable[[Path, Path], Path]
    atomic: bool = False
    shifts: bool = False

    @property
    def sounds(self) -> bool:
        """Whether its media are sounds."""
        return self.name == "sound"


KINDS = [
    Kind("grid", write_tiny_mrope, lambda path, _: write_grid_projector(path, _SIZE), atomic=True, shifts=True),
    Kind("gemma", write_tiny_gemma, lambda path, _: write_gemma_projector(path, _SIZE), atomic=True),
    Kind("varying", write_tiny_llama, lambda path, _: write_varying_projector(path, _SIZE)),
    Kind("sound", write_tiny_llama, lambda path, model: write_sound_projector(path, model, _BYTES)),
]

# Half of its layers are recurrent, so that no sequence is cut back.
HYBRID = Kind("hybrid", write_tiny_delta, lambda path, _: write_grid_projector(path, _SIZE), atomic=True, shifts=True)


class MadeKind:
    """A kind's files, a shard with them, and prompts for it."""

    def __init__(self, kind: Kind, layout: KvLayout, folder: Path, cells: int = 4096, **flags: Any) -> None:
        self.kind = kind
        self.model = kind.write_model(folder / "model.gguf")
        self.projector = kind.write_projector(folder / "mmproj.gguf", self.model)
        self.driver = ModelDriver(self.model, ctx_size=cells, kv_layout=layout.value, **flags)

    def medium(self, seed: int) -> Medium:
        """Return a random picture or sound."""
        random = np.random.default_rng(seed)
        if self.kind.sounds:
            samples = spelled_sound(_BYTES, random.choice(_BYTES, 20).tolist())
            shape = MediaShape(media_id=bytes([seed]), kind=MediaKind.AUDIO, samples=len(samples))
            return Medium(shape, samples.tobytes())
        width, height = random.integers(20, 150, 2).tolist()
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        shape = MediaShape(media_id=bytes([seed]), kind=MediaKind.IMAGE, width=width, height=height)
        return Medium(shape, pixels.tobytes())

    def parts(self, seed: int) -> tuple[str | Medium, ...]:
        """Return a prompt with two media."""
        first, second, third = TEXTS
        return first, self.medium(2 * seed), second, self.medium(2 * seed + 1), third

    def prompt(self, seed: int) -> MediaPrompt:
        """Return the cells of this prompt, with its media encoded."""
        tokenize = self.driver.backend.vocabulary.tokenize
        read = [
            part if isinstance(part, Medium) else tokenize(part, add_special=place == 0, parse_special=True)
            for place, part in enumerate(self.parts(seed))
        ]
        return media_prompt(self.driver, *read)

    def close(self) -> None:
        """Free the shard."""
        self.driver.engine.close()
