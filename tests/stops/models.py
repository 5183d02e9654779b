"""The models whose shards are stopped: between them they answer every call."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from caravan_testing.random_projectors import write_varying_projector
from caravan_testing.shard_models import DEMO_MODEL, fetched
from caravan_testing.shard_tiny_bert import TinyBert
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama

_SIZES = (70, 3_000, 30_000)
_SLOW_EVERY = 20
_FLAGS = ("-np", "4", "-c", "2048", "-t", "1")


@dataclass(frozen=True, slots=True)
class StoppedModel:
    """A model and the flags of its shard. One that ``generates`` also embeds and sees, the others embed only.

    ``longest``: tokens of a text to embed. ``slow``: it takes 20 s for the largest text to tokenize.
    """

    name: str
    file: Path
    flags: Sequence[str]
    generates: bool
    longest: int
    slow: bool = False

    def sizes(self, number: int) -> Sequence[int]:
        """Return the bytes of the texts to tokenize in the stop of this ``number``.

        A slow model gets the largest one in a few stops only, whose shards end while it is still tokenized.
        """
        return (*_SIZES, 100_000 if self.slow and number % _SLOW_EVERY else 500_000)


def write_models(folder: Path) -> list[StoppedModel]:
    """Return the demo model, whose tokenizer is a regular expression and a byte-pair encoding, and two small ones."""
    demo, tiny = fetched(DEMO_MODEL), write_tiny_llama(folder / "tiny.gguf", Shape(context=2048))
    for name, size in (("demo", 576), ("tiny", 64)):
        write_varying_projector(folder / f"mmproj-{name}.gguf", size)

    def flags(name: str) -> tuple[str, ...]:
        return (*_FLAGS, "--embeddings", "--mmproj", str(folder / f"mmproj-{name}.gguf"))

    encoder = TinyBert().write(folder / "encoder.gguf")
    return [
        StoppedModel("demo", demo, flags("demo"), generates=True, longest=256),
        StoppedModel("tiny", tiny, flags("tiny"), generates=True, longest=256, slow=True),
        StoppedModel("encoder", encoder, ("-t", "1"), generates=False, longest=100),
    ]
