"""The prompts that shards compute, for requests that begin alike; and who has a prefix, found by its hash."""

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.resident import Resident

T = TypeVar("T")
# Most prompts with an equally long common prefix that are compared with a request.
_MOST_PROMPTS = 8


class PrefixIndex(Generic[T]):
    """How often each holder has a prefix, by the prefix's hash: see `Sequence.prefix_hashes`."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[T, int]] = {}

    def add(self, holder: T, hashes: Iterable[int]) -> None:
        """Note that ``holder`` has these prefixes once more."""
        for key in hashes:
            counts = self._counts.setdefault(key, {})
            counts[holder] = counts.get(holder, 0) + 1

    def remove(self, holder: T, hashes: Iterable[int]) -> None:
        """Note that ``holder`` has these prefixes once less."""
        for key in hashes:
            counts = self._counts[key]
            if counts[holder] > 1:
                counts[holder] -= 1
                continue
            del counts[holder]
            if not counts:
                del self._counts[key]

    def forget(self, holder: T) -> None:
        """Note that ``holder`` is gone."""
        for key, counts in list(self._counts.items()):
            counts.pop(holder, None)
            if not counts:
                del self._counts[key]

    def holders(self, hashes: tuple[int, ...]) -> Collection[T]:
        """Return who has the longest prefix of ``hashes`` that anybody has."""
        for key in reversed(hashes):
            if (counts := self._counts.get(key)) is not None:
                return counts
        return ()

    def may_hold(self, hashes: tuple[int, ...]) -> Collection[T] | None:
        """Return who has any prefix of ``hashes``; None if anybody may, since there are none."""
        return self._counts.get(hashes[0], ()) if hashes else None


@dataclass(frozen=True, slots=True)
class AwaitedPrompt:
    """A request waits until the first ``length`` tokens of the prompt of ``leader`` are computed.

    It waits no longer if a shard opens that costs less than ``sharing_s`` to share, nor beyond ``until_s``.
    """

    leader: Resident
    length: int
    sharing_s: float
    until_s: float = math.inf

    def is_over(self, now_s: float) -> bool:
        """Whether the tokens are there, or will not be, or the request has waited long enough."""
        is_there = self.leader.is_running and self.leader.computed >= self.length
        return is_there or not self.leader.is_live or now_s >= self.until_s


class PromptsUnderWay:
    """The prompts that shards compute, and in ``awaited``, by request id, the requests that wait for one of them."""

    def __init__(self) -> None:
        self.awaited: dict[int, AwaitedPrompt] = {}
        self._by_shard: dict[str, list[tuple[Resident, ShardLedger]]] = {}
        self._by_prefix = PrefixIndex[tuple[Resident, ShardLedger]]()

    def replace(self, shard: ShardLedger, prompts: list[Resident]) -> None:
        """Note which ``prompts`` are under way on ``shard``."""
        self.forget(shard.name)
        if prompts:
            found = self._by_shard[shard.name] = [(resident, shard) for resident in prompts]
            for prompt in found:
                self._by_prefix.add(prompt, prompt[0].sequence.prompt_hashes)

    def forget(self, shard: str) -> None:
        """Forget the prompts of ``shard``."""
        for prompt in self._by_shard.pop(shard, ()):
            self._by_prefix.remove(prompt, prompt[0].sequence.prompt_hashes)

    def like(self, sequence: Sequence) -> Iterable[tuple[Resident, ShardLedger]]:
        """Return prompts with the most in common with ``sequence``, as far as hashes tell, and where they are."""
        return itertools.islice(self._by_prefix.holders(sequence.prompt_hashes), _MOST_PROMPTS)

    def pending_tokens(self, shard: str) -> int:
        """Return how many tokens of prompts ``shard`` has to compute."""
        return sum(resident.target - resident.computed for resident, _ in self._by_shard.get(shard, ()))
