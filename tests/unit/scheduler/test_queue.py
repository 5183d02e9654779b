"""The order of waiting requests, and which of them a request without room lets past."""

import math
from collections.abc import Callable

import pytest

from caravan_scheduler.core.generation import ANYONE, Tenant
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.waiting.fair_share import FairShare
from caravan_scheduler.waiting.queue import NotNow, WaitingQueue, effective_priority
from caravan_testing.requests import request

A, B = Tenant(name="a"), Tenant(name="b")


def waiting(
    request_id: int, *, priority: int = 0, tenant: Tenant = ANYONE, arrived_s: float = 0.0, started: bool = False
) -> Sequence:
    made = request(request_id, priority=priority, tenant=tenant, arrived_s=arrived_s)
    return Sequence(made, started=started)


def queue_of(*sequences: Sequence, max_bypass: int = 8, aging_s: float = math.inf) -> WaitingQueue:
    queue = WaitingQueue(max_bypass, aging_s, FairShare())
    for sequence in sequences:
        queue.push(sequence)
    return queue


def order(queue: WaitingQueue, now: float = 0.0) -> list[int]:
    return [sequence.request.request_id for sequence in queue.in_order(now)]


def places(answers: dict[int, str | NotNow]) -> Callable[[Sequence], str | NotNow]:
    return lambda sequence: answers.get(sequence.request_id, NotNow.NO_ROOM)


def test_the_order_is_by_arrival_when_all_else_is_equal() -> None:
    assert order(queue_of(*(waiting(number) for number in (3, 1, 2)))) == [1, 2, 3]


def test_the_order_is_by_priority_then_lost_cells_then_fair_share() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 10)
    queue = WaitingQueue(8, math.inf, fair_share)
    queue.push(waiting(1, tenant=A))
    queue.push(waiting(2, tenant=B))
    queue.push(waiting(3, tenant=A, started=True))
    queue.push(waiting(4, tenant=A, priority=1))
    queue.push(waiting(5, tenant=B, priority=-1, started=True))
    assert order(queue) == [4, 3, 2, 1, 5]
    fair_share.charge(B, 11)
    assert order(queue) == [4, 3, 1, 2, 5], "the counters of the moment decide"


@pytest.mark.parametrize(
    ("now", "aging_s", "expected"), [(5.0, 10.0, 2), (14.9, 10.0, 2), (15.0, 10.0, 3), (1e9, math.inf, 2)]
)
def test_priority_grows_with_age(now: float, aging_s: float, expected: int) -> None:
    assert effective_priority(waiting(1, priority=2, arrived_s=5.0).request, now, aging_s) == expected


def test_a_request_that_waited_long_goes_before_a_higher_priority_that_did_not() -> None:
    queue = queue_of(waiting(1), waiting(2, priority=1, arrived_s=9.0), aging_s=10.0)
    assert order(queue, 9.0) == [2, 1]
    assert order(queue, 10.0) == [1, 2]


def test_age_raises_priority_to_the_highest_that_waits_and_no_further() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 10)
    queue = WaitingQueue(8, 10.0, fair_share)
    for sequence in (waiting(1, tenant=A), waiting(2, tenant=B, arrived_s=100.0)):
        queue.push(sequence)
    assert order(queue, 100.0) == [2, 1], "a flood that has grown old is still a flood"


def test_the_first_request_that_fits_is_taken_and_counted_by_those_it_passes() -> None:
    first, second, third = sequences = [waiting(number) for number in (1, 2, 3)]
    queue = queue_of(*sequences)
    assert queue.pop_fitting(places({2: "shard", 3: "shard"})) == (second, "shard")
    assert [sequence.bypassed for sequence in sequences] == [1, 0, 0]
    assert list(queue) == [first, third]
    assert queue.pop_fitting(places({})) is None
    assert first.bypassed == 1, "nobody went past"


def test_a_place_that_is_false_is_a_place() -> None:
    queue = queue_of(waiting(1))
    assert queue.pop_fitting(lambda sequence: 0) is not None


def test_no_request_passes_one_that_was_bypassed_enough() -> None:
    queue = queue_of(*(waiting(number) for number in range(1, 9)), max_bypass=2)
    fits: dict[int, str | NotNow] = dict.fromkeys(range(2, 9), "shard")
    assert queue.pop_fitting(places(fits)) is not None
    assert queue.pop_fitting(places(fits)) is not None
    assert queue.pop_fitting(places(fits)) is None
    urgent = waiting(9, priority=1)
    queue.push(urgent)
    assert queue.pop_fitting(places(fits | {9: "shard"})) == (urgent, "shard"), "it is not behind"
    popped = queue.pop_fitting(places(fits | {1: "shard"}))
    assert popped is not None
    assert popped[0].request.request_id == 1


def test_a_request_whose_prefix_is_coming_is_passed_without_counting() -> None:
    sequences = [waiting(number) for number in range(1, 6)]
    queue = queue_of(*sequences, max_bypass=0)
    answers: dict[int, str | NotNow] = {
        1: NotNow.PREFIX_COMING,
        2: "shard",
        3: "shard",
        4: NotNow.PREFIX_COMING,
        5: NotNow.PREFIX_COMING,
    }
    assert queue.pop_fitting(places(answers)) == (sequences[1], "shard")
    assert queue.pop_fitting(places(answers)) == (sequences[2], "shard")
    assert queue.pop_fitting(places(answers)) is None
    assert [sequence.bypassed for sequence in sequences] == [0] * 5


def test_no_bypass_means_strict_order() -> None:
    queue = queue_of(waiting(1), waiting(2), max_bypass=0)
    assert queue.pop_fitting(places({2: "shard"})) is None


def test_remove_takes_out_the_given_request() -> None:
    sequences = [waiting(number) for number in (1, 2, 3)]
    queue = queue_of(*sequences)
    queue.remove(sequences[1])
    assert len(queue) == 2
    assert list(queue) == [sequences[0], sequences[2]]
    with pytest.raises(AssertionError, match="request 2 is not waiting"):
        queue.remove(sequences[1])
    with pytest.raises(AssertionError, match="request 3 is not waiting"):
        queue.remove(waiting(3))
