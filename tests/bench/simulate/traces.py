"""What clients ask for, and when: synthetic traces, deterministic by their seed."""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from caravan_studio.replay.played_shard import OUTPUT_TOKEN_ID

# A tuple, so that equal tokens are one object: a trace of an hour has 100 million.
_VOCABULARY = tuple(range(2_000, 50_000))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, in seconds, its prompt, and how many tokens are generated for it."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by time of arrival.

    ``hashed_tokens``: first tokens of a prompt that tell best which prompts have a prefix in common; a gateway that
    hashes prefixes is configured with this.
    """

    arrivals: tuple[Arrival, ...]
    hashed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is asked for: requests per second for so many seconds."""

    per_second: float
    seconds: float
    seed: int


class _Source:
    def __init__(self, load: Load) -> None:
        self.random = random.Random(load.seed)
        self._load = load

    def times(self, per_second: float) -> Iterator[float]:
        """Yield the arrivals of a Poisson process."""
        at_s = self.random.expovariate(per_second)
        while at_s < self._load.seconds:
            yield at_s
            at_s += self.random.expovariate(per_second)

    def words(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.choices(_VOCABULARY, k=count))

    def between(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def zipf(self, prefixes: list[tuple[int, ...]]) -> Callable[[], tuple[int, ...]]:
        """Return a function that draws one of ``prefixes``: the nth in proportion to 1/n."""
        weights = list(itertools.accumulate(1 / rank for rank in range(1, len(prefixes) + 1)))
        return lambda: self.random.choices(prefixes, cum_weights=weights)[0]


def poisson(load: Load) -> Trace:
    """Unrelated prompts of 200 to 800 tokens."""
    source = _Source(load)
    return _trace(_unrelated(source, at_s) for at_s in source.times(load.per_second))


def day(load: Load) -> Trace:
    """The same as `poisson`, at a rate that rises from a tenth of the load's to all of it and falls again."""
    source = _Source(load)
    return _trace(_unrelated(source, at_s) for at_s in _day_times(source, load))


def mixed_day(load: Load) -> Trace:
    """The same as `mixed_lengths`, at the rate of `day`."""
    source = _Source(load)
    return _trace(_mixed(source, at_s) for at_s in _day_times(source, load))


def _day_times(source: _Source, load: Load) -> Iterator[float]:
    """Yield arrivals at a rate that rises from a tenth of the load's to all of it and falls again."""
    for at_s in source.times(load.per_second):
        if source.random.random() < 0.1 + 0.9 * math.sin(math.pi * at_s / load.seconds) ** 2:
            yield at_s


def bursts(load: Load) -> Trace:
    """The same, of which a burst of 40 arrives within a second each time; bursts are a Poisson process."""
    source = _Source(load)
    starts = list(source.times(load.per_second / 40))
    return _trace(_unrelated(source, start_s + source.random.random()) for start_s in starts for _ in range(40))


def shared_prefixes(load: Load) -> Trace:
    """Prompts that begin with one of 200 prefixes of 2,000 tokens, drawn by Zipf's law, and 50 tokens of their own."""
    source = _Source(load)
    prefix = source.zipf([source.words(2_000) for _ in range(200)])
    arrivals = (
        Arrival(at_s, prefix() + source.words(50), source.between(50, 150)) for at_s in source.times(load.per_second)
    )
    return _trace(arrivals, hashed_tokens=256)


def conversations(load: Load) -> Trace:
    """Conversations of 6 turns behind one of 20 system prompts of 500 tokens, with 10 s from turn to turn on average.

    A prompt contains all earlier prompts and answers. Users write 100 to 300 tokens.
    """
    source = _Source(load)
    system = source.zipf([source.words(500) for _ in range(20)])
    arrivals = []
    for start_s in source.times(load.per_second / 6):
        at_s, prompt = start_s, system()
        for _ in range(6):
            prompt += source.words(source.between(100, 300))
            output_tokens = source.between(50, 150)
            arrivals.append(Arrival(at_s, prompt, output_tokens))
            prompt += (OUTPUT_TOKEN_ID,) * output_tokens
            at_s += 5.0 + source.random.expovariate(1 / 5.0)
    return _trace((one for one in arrivals if one.at_s < load.seconds), hashed_tokens=600)


def mixed_lengths(load: Load) -> Trace:
    """Unrelated prompts: 80 % of 50 to 300 tokens, 15 % of 1,000 to 2,000, 5 % of 5,000 to 8,000.

    Outputs have 20 to 400 tokens.
    """
    source = _Source(load)
    return _trace(_mixed(source, at_s) for at_s in source.times(load.per_second))


TRACES: dict[str, Callable[[Load], Trace]] = {
    "poisson": poisson,
    "day": day,
    "bursts": bursts,
    "shared-prefixes": shared_prefixes,
    "conversations": conversations,
    "mixed-lengths": mixed_lengths,
    "mixed-day": mixed_day,
}


def _unrelated(source: _Source, at_s: float) -> Arrival:
    return Arrival(at_s, source.words(source.between(200, 800)), source.between(50, 150))


def _mixed(source: _Source, at_s: float) -> Arrival:
    low, high = source.random.choices([(50, 300), (1_000, 2_000), (5_000, 8_000)], weights=[80, 15, 5])[0]
    return Arrival(at_s, source.words(source.between(low, high)), source.between(20, 400))


def _trace(arrivals: Iterator[Arrival], hashed_tokens: int = 64) -> Trace:
    return Trace(tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)), hashed_tokens)


BLOCK_TOKENS = 512


def read_trace(path: Path, *, speed: float = 1.0) -> Trace:
    """Return the trace of ``path``, ``speed`` times as fast as it was recorded. Tokens are made up for each block.

    Raises ValueError if it has sessions, whose requests come after answers.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if any("timestamp" not in line for line in lines):
        raise ValueError(f"{path} has sessions: simulate it with --agents")
    arrivals = [
        Arrival(
            line["timestamp"] / 1000 / speed,
            _prompt(line["hash_ids"], line["input_length"]),
            max(1, line["output_length"]),
        )
        for line in lines
    ]
    return Trace(tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)), BLOCK_TOKENS)


def _prompt(blocks: list[int], length: int) -> tuple[int, ...]:
    tokens: list[int] = []
    for block in blocks:
        tokens += random.Random(block).choices(range(2_000, 50_000), k=BLOCK_TOKENS)
    return tuple(tokens[:length])
