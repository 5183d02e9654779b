"""How long the steps of a played shard take."""

import json
from dataclasses import dataclass
from pathlib import Path

from caravan_studio.replay.measured_times import Points, at_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step = ``decode`` of its decoding sequences + ``prompt`` of its prompt tokens + attention.

    Each is drawn through its points by straight lines, of which the last one continues. Attention takes ``pair_s`` for
    each prompt token and each token of context before it. Copying a cell out of the cache or back takes ``cell_s``.
    """

    decode: Points
    prompt: Points
    pair_s: float = 0.0
    cell_s: float = 6e-6

    def seconds(self, sequences: int, prompt_tokens: int = 0, pairs: int = 0) -> float:
        """Return the seconds of a step."""
        return at_size(self.decode, sequences) + at_size(self.prompt, prompt_tokens) + self.pair_s * pairs

    def slower(self, factor: float) -> "StepTimes":
        """Return the times of a shard that computes ``factor`` times slower. Copies take as long."""
        return StepTimes(
            decode=tuple((size, seconds * factor) for size, seconds in self.decode),
            prompt=tuple((size, seconds * factor) for size, seconds in self.prompt),
            pair_s=self.pair_s * factor,
            cell_s=self.cell_s,
        )


# A model of 8 billion parameters on one GPU, roughly: 25 ms for 32 sequences, 5,000 prompt tokens a second.
LINEAR = StepTimes(decode=((0, 0.020), (32, 0.025)), prompt=((0, 0.0), (1, 0.0002)), pair_s=1e-8)


def recorded(path: Path) -> StepTimes:
    """Read what `bench.shard_steps` recorded with ``--record``."""
    data = json.loads(path.read_text())
    return StepTimes(
        decode=tuple((size, seconds) for size, seconds in data["decode"]),
        prompt=tuple((size, seconds) for size, seconds in data["prompt"]),
        pair_s=data.get("pair_s", 0.0),
    )
