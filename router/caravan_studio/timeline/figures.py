"""Figures of the last minute: rates, and times as histograms of a second each."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from caravan_studio.timeline.messages import Figures, Quantiles

WINDOW_S = 60
# A bucket's times differ by a factor of 2 ** (1 / 8).
_BUCKETS_PER_OCTAVE = 8


@dataclass(slots=True)
class _Second:
    second: int
    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    started: int = 0
    started_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: Counter[int] = field(default_factory=Counter)
    gaps: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class _Pace:
    """When the tokens before the last ones came from a shard, and the steps and tokens that came since."""

    before_s: float
    last_s: float
    steps: int = 0
    tokens: int = 0


class RecentFigures:
    """Counts while somebody watches. Methods that a step calls do as little as possible."""

    def __init__(self, now: float) -> None:
        self._began_s = now
        self._seconds: deque[_Second] = deque([_Second(int(now))])
        # By shard. A token's gap is the time since the shard's step before, which had one for the same sequence.
        self._paces: dict[str, _Pace] = {}

    def _at(self, now: float) -> _Second:
        last = self._seconds[-1]
        if int(now) <= last.second:
            return last
        self._seconds.append(_Second(int(now)))
        while self._seconds[0].second < int(now) - WINDOW_S:
            self._seconds.popleft()
        return self._seconds[-1]

    def note_step(self, shard: str, now: float, tokens: int, following: int) -> None:
        """Note a step with ``tokens``, of which ``following`` follow another one of their sequence."""
        second = self._at(now)
        second.steps += 1
        second.tokens += tokens
        pace = self._paces.get(shard)
        if pace is None:
            self._paces[shard] = _Pace(now, now)
            return
        if now != pace.last_s:
            self._end_pace(pace, second)
            pace.before_s, pace.last_s, pace.steps, pace.tokens = pace.last_s, now, 0, 0
        pace.steps += 1
        pace.tokens += following

    @staticmethod
    def _end_pace(pace: _Pace, second: _Second) -> None:
        """Count the gaps of what came together: several steps may be reported at once."""
        if pace.tokens:
            second.gaps[_bucket((pace.last_s - pace.before_s) / pace.steps)] += pace.tokens

    def forget(self, shard: str) -> None:
        """Forget when the last step of a shard was, which is gone."""
        self._paces.pop(shard, None)

    def note_prompt(self, now: float, tokens: int) -> None:
        """Note computed tokens of prompts."""
        self._at(now).prompt_tokens += tokens

    def note_start(self, now: float, tokens: int, cached: int) -> None:
        """Note a request that starts, with a prompt of ``tokens``."""
        second = self._at(now)
        second.started += 1
        second.started_tokens += tokens
        second.cached_tokens += cached

    def note_first_token(self, now: float, waited_s: float) -> None:
        """Note the first token of a request, and how long its client has waited for it."""
        self._at(now).first_tokens[_bucket(waited_s)] += 1

    def figures(self, now: float) -> Figures:
        """Return the figures up to ``now``."""
        self._at(now)
        seconds = self._seconds
        window_s = max(1e-3, min(float(WINDOW_S), now - self._began_s))
        prompts = sum(one.started_tokens for one in seconds)
        return Figures(
            window_s=round(window_s, 1),
            tokens_s=round(sum(one.tokens for one in seconds) / window_s, 1),
            prompt_tokens_s=round(sum(one.prompt_tokens for one in seconds) / window_s, 1),
            ttft_s=_quantiles(sum((one.first_tokens for one in seconds), Counter[int]())),
            itl_s=_quantiles(sum((one.gaps for one in seconds), Counter[int]())),
            hit_rate=round(sum(one.cached_tokens for one in seconds) / prompts, 3) if prompts else None,
            steps_s=round(sum(one.steps for one in seconds) / window_s, 1),
            requests=sum(one.started for one in seconds),
        )


def _bucket(seconds: float) -> int:
    return math.floor(math.log2(max(seconds, 1e-6)) * _BUCKETS_PER_OCTAVE)


def _quantiles(counts: Counter[int]) -> Quantiles | None:
    total = counts.total()
    if not total:
        return None
    return Quantiles(_quantile(counts, 0.5 * total), _quantile(counts, 0.99 * total))


def _quantile(counts: Counter[int], below: float) -> float:
    """Return the middle of the bucket in which the ``below`` smallest times end."""
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= below:
            break
    return float(f"{2 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE):.3g}")
