"""What clients saw in a simulation."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from caravan_scheduler.actions import Action, Deliver, Fail, Preempt, Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """A request is good if its first token came within ``ttft_s`` and the others ``itl_s`` apart on average."""

    ttft_s: float = 2.0
    itl_s: float = 0.2


@dataclass(slots=True)
class _Stream:
    arrived_s: float
    measured: bool
    first_s: float = math.inf
    last_s: float = math.inf
    tokens: int = 0
    ended: bool = False

    def is_good(self, targets: Targets) -> bool:
        if not self.ended or self.first_s - self.arrived_s > targets.ttft_s:
            return False
        return self.last_s - self.first_s <= targets.itl_s * max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Requests per second that came and that were good, percentiles in seconds, and the share of cached tokens.

    A request without a token counts with the time that it waited until the end. ``shards``: how many there were on
    average.
    """

    offered: float
    goodput: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    hit_rate: float
    output_tokens_per_s: float
    preemptions: int
    step_cpu_us: float = 0.0
    shards: float = 0.0


class Clients:
    """Collects what schedulers deliver. Requests that arrive in [``from_s``, ``until_s``) are measured."""

    def __init__(self, targets: Targets, from_s: float, until_s: float) -> None:
        self._targets = targets
        self._from_s = from_s
        self._until_s = until_s
        self._streams: dict[int, _Stream] = {}
        self._open: set[int] = set()
        self._gaps_s = array("f")
        self._prompt_tokens = self._cached_tokens = self._output_tokens = self._preemptions = 0
        # Requests that ended since the last call of `take_ended`.
        self._ended: list[int] = []

    def ask(self, request_id: int, now_s: float) -> None:
        """Note that a request arrived."""
        self._streams[request_id] = _Stream(now_s, self._from_s <= now_s < self._until_s)
        self._open.add(request_id)

    def hear(self, now_s: float, action: Action) -> None:
        """Note what a scheduler says of a request."""
        if isinstance(action, Deliver):
            self._receive(self._streams[action.request_id], action, now_s)
        elif isinstance(action, Start):
            if self._streams[action.request_id].measured:
                self._prompt_tokens += action.prompt_tokens
                self._cached_tokens += action.cached_tokens
        elif isinstance(action, Preempt):
            self._preemptions += 1
        elif isinstance(action, Fail):
            raise AssertionError(f"no request can fail here: {action}")

    def _receive(self, stream: _Stream, action: Deliver, now_s: float) -> None:
        if not stream.tokens:
            stream.first_s = now_s
        elif stream.measured:
            self._gaps_s.append(now_s - stream.last_s)
        stream.last_s = now_s
        stream.tokens += len(action.tokens)
        if self._from_s <= now_s < self._until_s:
            self._output_tokens += len(action.tokens)
        if action.tokens[-1].finish is not None:
            stream.ended = True
            self._open.remove(action.request_id)
            self._ended.append(action.request_id)

    def take_ended(self) -> list[int]:
        """Return the requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def are_decided(self, now_s: float) -> bool:
        """Whether no request that has not ended can still be good."""
        streams = (self._streams[request_id] for request_id in self._open)
        return all(min(one.first_s, now_s) - one.arrived_s > self._targets.ttft_s for one in streams)

    def report(self, now_s: float) -> Report:
        """Return the results of all measured requests."""
        streams = [stream for stream in self._streams.values() if stream.measured]
        seconds = self._until_s - self._from_s
        ttfts = sorted(min(one.first_s, now_s) - one.arrived_s for one in streams)
        gaps = sorted(self._gaps_s)
        return Report(
            offered=len(streams) / seconds,
            goodput=sum(one.is_good(self._targets) for one in streams) / seconds,
            ttft_p50_s=percentile(ttfts, 0.5),
            ttft_p99_s=percentile(ttfts, 0.99),
            itl_p50_s=percentile(gaps, 0.5),
            itl_p99_s=percentile(gaps, 0.99),
            hit_rate=self._cached_tokens / max(1, self._prompt_tokens),
            output_tokens_per_s=self._output_tokens / seconds,
            preemptions=self._preemptions,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value of ``values``, which are sorted, below which so many are; 0 without any."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
