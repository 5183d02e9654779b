"""Over random edits of conversations, the reasons for what is recomputed and the first difference are always right."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan_scheduler.actions import Start
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.core.recomputed import Reason, Recomputed
from caravan_scheduler.prefix_keys import BLOCK_TOKENS
from caravan_testing.examples import examples
from caravan_testing.ledgers import SAVING, limits_of
from caravan_testing.simulation import Simulation

pytestmark = pytest.mark.examples

EDITS = 10
# What was common and not cached: the reasons of one kind are interchangeable only where the test cannot tell.
_AFTER = (Reason.NEW, Reason.DIFFERS, Reason.OTHER_SALT, Reason.OTHER_ADAPTER, Reason.END)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


class Conversations:
    """Edits conversations of one simulated fleet at random, and knows by brute force what each prompt continues."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.caches = choose.random() < 0.9
        saving = SAVING if choose.random() < 0.6 else {}
        # A small cache evicts; where nothing is saved, tokens are forgotten by that.
        cells = choose.choice([300, 1000, 4000])
        limits = limits_of(cells=cells, cells_per_sequence=cells, max_sequences=64, max_batch_tokens=128, **saving)
        self.fleet = Simulation(SchedulerConfig(prefix_caching=self.caches))
        self.limits = limits
        self.fleet.join("a", limits)
        self.evicts = cells < 4000
        self.is_flushed = self.is_lost = False
        # Tenant, salt and adapter, with what was computed there.
        self.known: list[tuple[tuple[str, str, str], tuple[int, ...]]] = []

    def tokens(self, most: int) -> tuple[int, ...]:
        return tuple(self.choose.randrange(1, 60) for _ in range(self.choose.randint(1, most)))

    def edited(self) -> tuple[tuple[str, str, str], tuple[int, ...]]:
        """Return a place and a prompt: mostly an edit of one that there was."""
        choose = self.choose
        place = ("one", "", "")
        if not self.known or choose.random() < 0.1:
            return place, self.tokens(80)
        place, before = choose.choice(self.known)
        match choose.randrange(8):
            case 0 | 1 | 2:
                prompt = before + self.tokens(30)
            case 3:
                at = choose.randrange(len(before))
                prompt = before[:at] + (before[at] + 61,) + before[at + 1 :] + self.tokens(10)
            case 4:
                at = choose.randrange(len(before))
                prompt = before[:at] + self.tokens(30)
            case 5:
                prompt = before[: choose.randint(1, len(before))]
            case 6:
                prompt = before
            case _:
                place = choose.choice([("two", "", ""), ("one", "salt", ""), ("one", "", "adapter")])
                prompt = before + self.tokens(10)
        return place, prompt[-200:] if len(prompt) > 200 else prompt

    def disturb(self) -> None:
        """Take what is kept from the shard, at times."""
        match self.choose.randrange(12):
            case 0:
                self.fleet.flush("a")
                self.is_flushed = True
            case 1:
                self.fleet.lose("a")
                self.fleet.join("a", self.limits)
                self.is_lost = True

    def check_one(self) -> None:
        place, prompt = self.edited()
        tenant, salt, adapter = place
        request_id = self.fleet.complete(
            prompt, 3, ignore_eos=True, tenant=Tenant(name=tenant), namespace=f"{tenant}\0{salt}", adapter=adapter
        )
        (start,) = (one for one in self.fleet.sent(Start) if one.request_id == request_id)
        self.check(place, prompt, start.cached_tokens, start.recomputed)
        computed = prompt + tuple(self.fleet.received[request_id][:-1])
        self.known.append((place, computed))

    def check(self, place: tuple[str, str, str], prompt: tuple[int, ...], cached: int, told: Recomputed) -> None:
        position = cached
        for part in told.parts:
            assert (part.start, part.tokens > 0) == (position, True), "parts follow each other"
            position += part.tokens
        assert position == len(prompt), "all that is computed has a reason"
        reasons = {part.reason for part in told.parts}
        end = max(cached, len(prompt) - 2)

        own = [tokens for where, tokens in self.known if where == place]
        others = [(where, tokens) for where, tokens in self.known if where[0] == place[0] and where != place]
        own_length = max((common(prompt, tokens) for tokens in own), default=0)
        length = max([own_length, *(common(prompt, tokens) for _, tokens in others)])
        # Less than a block does not count.
        own_length, length = (0 if one < BLOCK_TOKENS else one for one in (own_length, length))
        if own_length >= end:
            length = own_length
        length = max(length, cached)

        if told.is_exact:
            assert told.common == length or (told.common >= end and length >= end)
        else:
            assert told.common <= length < told.common - told.common % BLOCK_TOKENS + BLOCK_TOKENS
            assert told.common < BLOCK_TOKENS or not self.is_held, "the tokens are there, so the place is known"
        if told.common < end:
            last = told.parts[-1]
            nearest = own if own_length == length else [tokens for _, tokens in others]
            is_whole = length < BLOCK_TOKENS or prompt[:length] in nearest
            assert last.start == told.common
            if told.is_exact:
                assert last.reason is (Reason.NEW if is_whole else Reason.DIFFERS)
            else:
                assert last.reason is (Reason.DIFFERS if told.common >= BLOCK_TOKENS else Reason.NEW)
        else:
            assert reasons.isdisjoint({Reason.NEW, Reason.DIFFERS})
            assert told.parts[-1].reason is Reason.END
        if own_length < told.common <= length and cached < told.common:
            beyond = [part for part in told.parts if part.start + part.tokens > max(own_length, cached)][0]
            wanted = {
                Reason.OTHER_SALT if where[2] == place[2] else Reason.OTHER_ADAPTER
                for where, tokens in others
                if common(prompt, tokens) == length
            }
            if told.is_exact and told.common == length:
                assert beyond.reason in wanted
        self.check_gone([part.reason for part in told.parts if part.reason not in _AFTER])

    @property
    def is_held(self) -> bool:
        """Whether no token of what was computed has been given up."""
        return self.caches and not (self.evicts or self.is_flushed or self.is_lost)

    def check_gone(self, reasons: list[Reason]) -> None:
        """Check why tokens are computed again that an earlier prompt of the same place had."""
        allowed = {Reason.NOT_WORTH_COPYING, Reason.PART_OF_BLOCK}
        if not self.caches:
            allowed = {Reason.NEVER_SAVED}
        else:
            if self.evicts or self.is_flushed:
                allowed.add(Reason.EVICTED)
            if self.is_lost:
                allowed.add(Reason.SHARD_LOST)
        assert set(reasons) <= allowed


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32))
def test_reason_and_first_difference_are_right_over_random_edits(seed: int) -> None:
    conversations = Conversations(random.Random(seed))
    for _ in range(EDITS):
        conversations.check_one()
        conversations.disturb()
