"""On which thread masks are found: beside the forward pass, unless to hand them over takes longer than to find them."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from caravan_shard.constraints.matching import Finder, Matching

CHEAP, DEAR = 10e-6, 300e-6
# After so many steps the first guess is forgotten.
ENOUGH = 50


class Clock:
    """The processor time of all threads, of which one works at a time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class TimedMatching(Matching):
    """Takes ``seconds`` for a mask, and notes on which thread it was found."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.thread = 0

    def find(self, output: Sequence[int]) -> None:
        self.clock.seconds += self.seconds
        self.thread = threading.get_ident()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def finder(clock: Clock) -> Iterator[Finder]:
    finder = Finder(1, clock)
    yield finder
    finder.close()


def step(finder: Finder, matchings: Sequence[TimedMatching]) -> bool:
    """Find the masks of a step, and return whether the thread that asked for them found them."""
    finder.begin([(matching, ()) for matching in matchings])
    finder.wait()
    threads = {matching.thread for matching in matchings}
    assert len(threads) == 1
    return threads == {threading.get_ident()}


def test_few_cheap_masks_are_found_at_once_when_they_are_known_to_be_cheap(finder: Finder, clock: Clock) -> None:
    alone = [TimedMatching(clock, CHEAP)]
    found = [step(finder, alone) for _ in range(ENOUGH)]
    assert not found[0]
    assert found[-1]


def test_many_masks_are_found_beside_the_forward_pass(finder: Finder, clock: Clock) -> None:
    many = [TimedMatching(clock, CHEAP) for _ in range(16)]
    assert not any(step(finder, many) for _ in range(ENOUGH))
    # The time of each is known, not that of the step.
    assert step(finder, many[:1])


def test_a_dear_mask_lets_the_next_ones_be_found_beside_the_forward_pass(finder: Finder, clock: Clock) -> None:
    alone = TimedMatching(clock, CHEAP)
    for _ in range(ENOUGH):
        step(finder, [alone])
    alone.seconds = DEAR
    assert step(finder, [alone])
    alone.seconds = CHEAP
    later = [step(finder, [alone]) for _ in range(ENOUGH)]
    assert not later[0]
    assert later[-1]
