"""Over random edits of conversations, the reason why tokens are computed and the first difference are always right."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan_scheduler.actions import Start
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.core.recomputed import Reason, Recomputed
from caravan_scheduler.core.tokens import common_length
from caravan_scheduler.known_prompts import MOST_COMPARED
from caravan_scheduler.prefix_keys import BLOCK_TOKENS
from caravan_testing.examples import examples
from caravan_testing.ledgers import SAVING, limits_of
from caravan_testing.simulation import Simulation

pytestmark = pytest.mark.examples

EDITS = 10
MOST_TOKENS = 200
ROOMY = 4000
# Reasons that do not say what became of tokens that the same API key, salt and adapter had before.
NOT_HAD = {Reason.NEW, Reason.DIFFERS, Reason.OTHER_SALT, Reason.OTHER_ADAPTER, Reason.END}


@dataclass(frozen=True)
class Place:
    """Prompts of one place share cells; those of one ``tenant`` are compared."""

    tenant: str = "one"
    salt: str = ""
    adapter: str = ""


OTHER_PLACES = (Place(tenant="two"), Place(salt="salt"), Place(adapter="adapter"))


class Conversations:
    """Edits conversations at random, and finds by brute force what each prompt has in common with those before it.

    Caches are small or large, with or without memory for what makes way, and lose all they have at times.
    """

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.caches = choose.random() < 0.9
        cells = choose.choice([300, 1000, ROOMY])
        saving = SAVING if choose.random() < 0.6 else {}
        self.limits = limits_of(cells=cells, cells_per_sequence=cells, max_sequences=64, **saving)
        self.fleet = Simulation(SchedulerConfig(prefix_caching=self.caches))
        self.fleet.join("a", self.limits)
        # Why tokens can be gone by now.
        self.gone = {Reason.EVICTED} if cells < ROOMY else set()
        self.known: list[tuple[Place, tuple[int, ...]]] = []

    def tokens(self, most: int) -> tuple[int, ...]:
        return tuple(self.choose.randrange(1, 60) for _ in range(self.choose.randint(1, most)))

    def edited(self) -> tuple[Place, tuple[int, ...]]:
        """Return a prompt: mostly what a client makes of an earlier one."""
        choose = self.choose
        if not self.known or choose.random() < 0.1:
            return Place(), self.tokens(80)
        place, before = choose.choice(self.known)
        at = choose.randrange(len(before))
        match choose.choice(["continue", "continue", "change", "cut", "begin", "repeat", "elsewhere"]):
            case "continue":
                prompt = before + self.tokens(30)
            case "change":
                prompt = (*before[:at], before[at] + 61, *before[at + 1 :], *self.tokens(10))
            case "cut":
                prompt = before[:at] + self.tokens(30)
            case "begin":
                prompt = before[: at + 1]
            case "elsewhere":
                place, prompt = choose.choice(OTHER_PLACES), before + self.tokens(10)
            case _:
                prompt = before
        return place, prompt[-MOST_TOKENS:]

    def disturb(self) -> None:
        """Take what is kept from the shard, at times."""
        match self.choose.randrange(12):
            case 0:
                self.fleet.flush("a")
                self.gone.add(Reason.EVICTED)
            case 1:
                self.fleet.lose("a")
                self.fleet.join("a", self.limits)
                self.gone.add(Reason.SHARD_LOST)
            case _:
                pass

    def check_next(self) -> None:
        place, prompt = self.edited()
        request_id = self.fleet.complete(
            prompt,
            3,
            ignore_eos=True,
            tenant=Tenant(name=place.tenant),
            namespace=f"{place.tenant}\0{place.salt}",
            adapter=place.adapter,
        )
        (start,) = (one for one in self.fleet.sent(Start) if one.request_id == request_id)
        self.check(place, prompt, start)
        # The last token is sampled, and never computed.
        self.known.append((place, prompt + tuple(self.fleet.received[request_id][:-1])))

    def check(self, place: Place, prompt: tuple[int, ...], start: Start) -> None:
        told, cached = start.recomputed, start.cached_tokens
        position = cached
        for part in told.parts:
            assert (part.start, part.tokens > 0) == (position, True), "parts follow each other"
            position += part.tokens
        assert position == len(prompt), "each token that is computed has a reason"
        own = [tokens for where, tokens in self.known if where == place]
        others = [(where, tokens) for where, tokens in self.known if where.tenant == place.tenant and where != place]
        own_length = _common(prompt, own)
        length = max(own_length, _common(prompt, [tokens for _, tokens in others]), cached)
        # The last two tokens are computed anyhow.
        end = max(cached, len(prompt) - 2)
        if told.common < end:
            self.check_difference(prompt, told, length)
            nearest = own if own_length == length else [tokens for _, tokens in others]
            is_whole = length < BLOCK_TOKENS or prompt[:length] in nearest
            goes_on = Reason.NEW if (is_whole and told.is_exact) or told.common < BLOCK_TOKENS else Reason.DIFFERS
            assert told.parts[-1].reason is goes_on
            assert told.parts[-1].start == told.common
        else:
            assert length >= end or not told.is_exact
            assert told.parts[-1].reason is Reason.END
        if told.is_exact and max(own_length, cached) < told.common == length:
            elsewhere = next(part for part in told.parts if part.start + part.tokens > max(own_length, cached))
            places = {where for where, tokens in others if common_length(prompt, tokens) == length}
            wanted = {_reason_elsewhere(place, where) for where in places}
            assert elsewhere.reason in wanted
        allowed = {Reason.PART_OF_BLOCK, Reason.NOT_WORTH_COPYING, *self.gone} if self.caches else {Reason.NEVER_SAVED}
        assert {part.reason for part in told.parts} <= NOT_HAD | allowed

    def check_difference(self, prompt: tuple[int, ...], told: Recomputed, length: int) -> None:
        if told.is_exact:
            assert told.common == length
        else:
            block = told.common - told.common % BLOCK_TOKENS
            assert told.common <= length < block + BLOCK_TOKENS
            alike = [tokens for _, tokens in self.known if common_length(prompt, tokens) >= block]
            is_held = self.caches and not self.gone and len(alike) <= MOST_COMPARED
            assert told.common < BLOCK_TOKENS or not is_held, "the place is known as long as tokens are held"


def _common(prompt: tuple[int, ...], known: list[tuple[int, ...]]) -> int:
    """Return how many first tokens ``prompt`` has in common with any of ``known``; less than a block does not count."""
    length = max((common_length(prompt, tokens) for tokens in known), default=0)
    return length if length >= BLOCK_TOKENS else 0


def _reason_elsewhere(place: Place, where: Place) -> Reason:
    return Reason.OTHER_SALT if where.adapter == place.adapter else Reason.OTHER_ADAPTER


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32))
def test_reason_and_first_difference_are_right_over_random_edits(seed: int) -> None:
    conversations = Conversations(random.Random(seed))
    for _ in range(EDITS):
        conversations.check_next()
        conversations.disturb()
