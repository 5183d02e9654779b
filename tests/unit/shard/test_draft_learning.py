"""How soon drafts of a model are used where they pay and left out where not, on toy models in virtual time."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.commands import Decode
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.drafts import DraftBudget, Drafting
from caravan_testing.shard_builders import EngineDriver, ToyDraftModel, first_chunk, toy_prompt, with_parameters

MOST = 4
CELLS, SEQUENCES = 1 << 16, 16

Seconds = Callable[[int], float]


def cpu(tokens: int) -> float:
    """Kernels compute four tokens together, and each group takes as long as reading the weights."""
    return {1: 0.0078, 2: 0.0115, 3: 0.012}.get(tokens, 0.0125 + 0.00185 * max(0, tokens - 4))


def cpu_head(tokens: int) -> float:
    return 0.0005 + 0.0002 * tokens


# Milliseconds of steps of 24 layers in Q4_0 on one core of a Xeon (AMX): four tokens take less time than three.
_XEON_MS = {1: 7.0, 2: 10.5, 3: 12.7, 4: 11.0, 5: 13.5, 6: 15.5, 8: 19.7, 9: 21.0, 10: 25.5, 12: 26.8, 16: 28.3}
_XEON_MS |= {20: 38.0, 24: 44.0, 32: 56.0, 40: 80.0}


def xeon(tokens: int) -> float:
    return float(np.interp(tokens, list(_XEON_MS), list(_XEON_MS.values()))) / 1000


def gpu(tokens: int) -> float:
    return 0.01 + 0.00005 * tokens


def gpu_head(tokens: int) -> float:
    return 0.0008 + 0.00001 * tokens


class Head(ToyDraftModel):
    """Is right at a place of a draft of a sequence as often as ``right`` says."""

    def __init__(self, right: Callable[[int, int], float], hook: Callable[[TokenBatch], Any]) -> None:
        super().__init__(hook=hook, cells=CELLS, max_sequences=SEQUENCES)
        self._right = right
        self._random = random.Random(3)
        self.ids: list[int] = []
        self.place = 0

    def logits(self, rows: int) -> Floats:
        found = super().logits(rows).copy()
        for row, sequence_id in enumerate(self.ids):
            if self._random.random() >= self._right(sequence_id, self.place):
                found[row] = np.roll(found[row], 1)
        self.place += 1
        return found


@dataclass
class World:
    """A shard whose clock only its steps move.

    ``factor``: how many times as long a step over so many tokens takes since the machine does something else.
    ``change_s``: how much longer a step takes after one of another size.
    """

    patch: pytest.MonkeyPatch
    steps: Seconds
    drafting: Seconds
    right: Callable[[int, int], float]
    factor: Callable[[int], float] = lambda _tokens: 1.0
    change_s: float = 0.0
    now_s: float = 0.0
    before: int = 0
    others_s: float = 0.0
    driver: EngineDriver = field(init=False)

    def __post_init__(self) -> None:
        for module in ("caravan_shard.engine.engine", "caravan_testing.shard_builders"):
            self.patch.setattr(f"{module}.perf_counter_ns", lambda: int(1e9 * self.now_s))
        self.patch.setattr("caravan_shard.speculation.model_drafter.perf_counter", lambda: self.now_s)
        head = Head(self.right, self._draft)
        self._head = head
        backend = ToyBackend(hook=self._step, draft_model=head, cells=CELLS, max_sequences=SEQUENCES)
        self.driver = EngineDriver(backend, drafting=Drafting())

    def _step(self, batch: TokenBatch) -> None:
        seconds = self.steps(len(batch.tokens)) + (self.change_s if len(batch.tokens) != self.before else 0.0)
        self.before = len(batch.tokens)
        others_s = seconds * (self.factor(len(batch.tokens)) - 1)
        self.now_s += seconds + others_s
        self.others_s += others_s
        self._head.place = 0

    def _draft(self, batch: TokenBatch) -> None:
        self.now_s += self.drafting(len(batch.tokens))
        # Before the first one, the attribute is not set.
        if hasattr(self, "_head"):
            self._head.ids = batch.sequence_ids[batch.outputs != 0].tolist()

    def rates(self, sequences: int, tokens: int) -> list[float]:
        """Return the rate of each sequence while it had ``tokens``, as a multiple of that without drafts.

        Time in which the machine does something else does not count.
        """
        driver, ids = self.driver, list(range(sequences))
        driver.engine.release_all()
        for key in ids:
            chunk = first_chunk(key, toy_prompt(f"{key} a prompt to begin"), max_new=10 * tokens, ignore_eos=True)
            driver.prefill(with_parameters(chunk, max_draft_tokens=MOST))
        began_s, ended_s = self.now_s - self.others_s, dict[int, float]()
        most = MOST * sequences
        assert driver.engine.begin_decode(Decode(sequence_ids=ids, max_steps=tokens, max_draft_tokens=most)) is None
        while len(ended_s) < sequences:
            driver.decode_once(ids, DraftBudget(most, tokens))
            for key in ids:
                if len(driver.output[key]) >= tokens:
                    ended_s.setdefault(key, self.now_s - self.others_s - began_s)
        return [tokens * self.steps(sequences) / ended_s[key] for key in ids]


def best(sequences: int, steps: Seconds, drafting: Seconds, right: float) -> float:
    """Return the gain of the best length that all drafts could have."""
    gains = [1.0]
    for length in range(1, MOST + 1):
        seconds = steps(sequences * (1 + length)) + length * drafting(sequences)
        gains.append(sum(right**place for place in range(length + 1)) * steps(sequences) / seconds)
    return max(gains)


COSTS = {"cpu": (cpu, cpu_head), "xeon": (xeon, cpu_head), "gpu": (gpu, gpu_head)}
PAYING = [
    ("cpu", 1),
    ("cpu", 2),
    ("cpu", 4),
    ("xeon", 1),
    ("xeon", 2),
    ("xeon", 4),
    ("gpu", 1),
    ("gpu", 8),
]


@pytest.mark.parametrize(("costs", "sequences"), PAYING)
def test_drafts_that_pay_are_used_from_the_first_steps_on(
    costs: str, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, drafting = COSTS[costs]
    world = World(monkeypatch, steps, drafting, lambda _key, _place: 0.9)
    rates = world.rates(sequences, 150)
    # What is gained of what could be.
    assert sum(rates) / sequences - 1 > 0.5 * (best(sequences, steps, drafting, 0.9) - 1) > 0


@pytest.mark.parametrize("disturbed", [1, 2])
@pytest.mark.parametrize(("costs", "sequences"), [one for one in PAYING if one[1] != 4])
def test_disturbed_steps_do_not_decide_for_long(
    costs: str, sequences: int, disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps of a size take five times as long: it seems too slow to be worth another try."""
    steps, drafting = COSTS[costs]
    times = Counter[int]()

    def slow_at_first(tokens: int) -> float:
        times[tokens] += 1
        return 5 if tokens > sequences and times[tokens] <= disturbed else 1

    world = World(monkeypatch, steps, drafting, lambda _key, _place: 0.9, slow_at_first)
    world.rates(sequences, 300)
    rates = world.rates(sequences, 150)
    assert sum(rates) / sequences - 1 > 0.6 * (best(sequences, steps, drafting, 0.9) - 1) > 0


def test_four_tokens_that_take_less_time_than_three_are_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five take less than three as well, so that three seem to be the least that four can take."""

    def steps(tokens: int) -> float:
        return {1: 0.0505, 2: 0.085, 3: 0.116, 4: 0.072, 5: 0.108}.get(tokens, 0.0174 * tokens)

    def drafting(tokens: int) -> float:
        return 0.0021 + 0.0012 * tokens

    world = World(monkeypatch, steps, drafting, lambda _key, _place: 0.9)
    world.rates(1, 80)
    assert world.rates(1, 160)[0] - 1 > 0.75 * (best(1, steps, drafting, 0.9) - 1) > 0.75


def test_lone_steps_without_drafts_do_not_make_drafts_seem_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of another size than the one before takes longer, as the first of those without drafts."""
    right = 0.95

    def steps(tokens: int) -> float:
        return {1: 0.0039, 2: 0.0072, 3: 0.0088, 4: 0.009}.get(tokens, 0.0035 * tokens)

    world = World(monkeypatch, steps, cpu_head, lambda _key, _place: right, change_s=0.003)
    assert fmean(world.rates(1, 200)[0] for _ in range(20)) > 1.1
    right = 0.6
    world.rates(1, 300)
    assert fmean(world.rates(1, 200)[0] for _ in range(4)) > 0.96


@pytest.mark.parametrize("seed", range(4))
def test_what_pays_is_used_on_a_machine_with_other_work(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step in thirty takes two to five times as long, and the number of sequences changes."""
    chance = random.Random(seed)
    world = World(
        monkeypatch,
        xeon,
        cpu_head,
        lambda _key, _place: 0.9,
        lambda _tokens: chance.choice([2, 3, 5]) if chance.random() < 1 / 30 else 1,
    )
    gains = {}
    for sequences in (1, 2, 4, 8):
        world.rates(sequences, 200)
        gains[sequences] = fmean(world.rates(sequences, 200))
    assert gains[1] > 1.5
    assert gains[2] > 1.3
    assert min(gains[4], gains[8]) > 0.98
    assert gains[4] + gains[8] > 2.1


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("costs", COSTS)
def test_drafts_that_are_wrong_are_given_up(costs: str, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *COSTS[costs], lambda _key, _place: 0.02)
    assert min(world.rates(sequences, 150)) > 0.93
    assert min(world.rates(sequences, 150)) > 0.98, "it is known"


def test_each_sequence_has_as_many_draft_tokens_as_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, gpu, cpu_head, lambda key, _place: (0.95, 0.5, 0.02)[key])
    world.rates(3, 80)
    counts = dict.fromkeys(range(3), 0)
    for _ in range(30):
        result = world.driver.decode_once([0, 1, 2], DraftBudget(3 * MOST, MOST))
        if result.drafts is not None:
            for key, drafted in zip(result.drafts.sequence_ids, result.drafts.drafted, strict=True):
                counts[key] += drafted
    assert counts[0] > counts[1] > counts[2]
    assert counts[2] < 0.3 * counts[0]


def test_places_of_a_draft_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that reads its own guesses is right once: longer drafts would take its time for nothing."""
    world = World(monkeypatch, gpu, cpu_head, lambda _key, place: 0.95 if place == 0 else 0.02)
    world.rates(2, 80)
    assert min(world.rates(2, 80)) > 0.9 * 1.95 * gpu(2) / (gpu(4) + cpu_head(4))
