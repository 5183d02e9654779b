"""The order in which requests and texts are admitted, and what each tenant gets."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_scheduler.core.generation import ANYONE, Tenant
from caravan_scheduler.sequence import Account, Sequence
from caravan_scheduler.waiting.fair_share import MOST_IDLE_SESSIONS, FairShare, Shares
from caravan_scheduler.waiting.queue import NotNow, WaitingQueue, effective_priority
from caravan_scheduler.waiting.text_queue import LEAST_ROOM, TextCall, TextQueue, room_of
from caravan_testing.requests import request

A, B = Tenant(name="a"), Tenant(name="b")


FULL = LEAST_ROOM
CALLS = st.tuples(st.integers(1, 2 * FULL), st.sampled_from([A, B]), st.integers(-2, 2))


def waiting(
    request_id: int,
    *,
    priority: int = 0,
    tenant: Tenant = ANYONE,
    arrived_s: float = 0.0,
    started: bool = False,
    session: tuple[str, float] = ("", 0.0),
) -> Sequence:
    """``session``: its name, and what it was charged."""
    name, tokens = session
    made = request(request_id, priority=priority, tenant=tenant, arrived_s=arrived_s, session=name)
    return Sequence(made, started=started, account=Account(tokens))


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


def test_below_a_tenant_the_session_that_was_charged_least_goes_first() -> None:
    fair_share = FairShare()
    fair_share.charge(B, 10)
    queue = WaitingQueue(8, math.inf, fair_share)
    flood, one = ("flood", 500.0), ("one", 20.0)
    for number, (tenant, session) in enumerate([(B, ("", 0.0)), (A, flood), (A, flood), (A, one), (A, one)], 1):
        queue.push(waiting(number, tenant=tenant, session=session))
    assert order(queue) == [4, 5, 2, 3, 1]


def test_sessions_of_tenants_that_are_equal_are_not_compared() -> None:
    """Otherwise a key whose sessions are new would pass one that has waited as long."""
    queue = queue_of(waiting(1, tenant=A, session=("old", 900.0)), waiting(2, tenant=B, session=("new", 0.0)))
    assert order(queue) == [1, 2]


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


A, B, C = (Tenant(name=name) for name in "abc")


def counters(fair_share: FairShare, *tenants: Tenant) -> list[float]:
    return [fair_share.counter(tenant) for tenant in tenants]


def test_tokens_count_by_weight() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 30)
    fair_share.charge(Tenant(name="b", weight=3.0), 30)
    fair_share.charge(Tenant(name="c", weight=0.5), 30)
    assert counters(fair_share, A, B, C) == [30, 10, 60]


def test_charging_many_at_once_is_charging_one_after_another() -> None:
    third = Tenant(name="b", weight=3.0)
    together, apart = FairShare(), FairShare()
    tenants = [third, third, A, third, Tenant(name="b", weight=0.7), third, A]
    together.charge_each(tenants, 2.0)
    for tenant in tenants:
        apart.charge(tenant, 2.0)
    assert counters(together, A, B) == counters(apart, A, B)


def test_a_new_weight_applies_to_later_charges() -> None:
    fair_share = FairShare()
    fair_share.charge(Tenant(name="a", weight=1.0), 10)
    fair_share.charge(Tenant(name="a", weight=2.0), 10)
    assert fair_share.counter(A) == 15


def test_idling_earns_no_credit() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 100)
    fair_share.charge(B, 70)
    fair_share.activate("c", ["a", "b"])
    assert fair_share.counter(C) == 70


def test_becoming_idle_and_active_again_clears_no_debt() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 10)
    fair_share.charge(B, 100)
    fair_share.activate("b", ["a"])
    assert counters(fair_share, A, B) == [10, 100]


def test_it_makes_no_difference_whether_the_new_tenant_is_among_the_active() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 50)
    fair_share.activate("b", ["a", "b"])
    assert fair_share.counter(B) == 50


def test_an_active_tenant_that_was_never_charged_has_the_least_counter() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 50)
    fair_share.charge(C, 20)
    fair_share.activate("c", ["a", "b"])
    assert counters(fair_share, A, B, C) == [50, 0, 20]


def test_without_active_tenants_all_counters_start_at_zero() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 100)
    fair_share.activate("b", [])
    assert counters(fair_share, A, B) == [0, 0]


@pytest.mark.parametrize("active", [["a"], []], ids=["beside another", "alone"])
def test_tenants_that_come_once_are_forgotten(active: list[str]) -> None:
    fair_share = FairShare()
    for visitor in range(1000):
        tenant = Tenant(name=f"visitor {visitor}")
        fair_share.activate(tenant.name, active)
        fair_share.charge(tenant, 10)
        fair_share.charge(A, 1)
    assert len(fair_share) < 20
    if active:
        assert fair_share.counter(A) == 1000


def test_a_new_session_has_no_credit_for_the_past_and_a_session_keeps_its_debt() -> None:
    shares = Shares()
    busy = shares.enter("key", "busy")
    busy.counter += 300
    new = shares.enter("key", "new")
    assert new.counter == 300
    new.counter += 50
    shares.leave("key", "new")
    busy.counter += 20
    assert shares.enter("key", "new").counter == 350
    assert shares.enter("other key", "new").counter == 0


def test_sessions_end_with_the_last_request_of_their_key() -> None:
    shares = Shares()
    for _ in range(2):
        shares.enter("key", "one").counter += 10
    shares.leave("key", "one")
    assert shares.enter("key", "other").counter == 20
    for session in ("one", "other"):
        shares.leave("key", session)
    assert shares.enter("key", "one").counter == 0


def test_few_idle_sessions_are_kept_however_many_there_were() -> None:
    shares = Shares()
    shares.enter("key", "waits for hours")
    for number in range(1000):
        shares.enter("key", f"session {number}").counter += 1 + number
        shares.leave("key", f"session {number}")
    # Those that were charged most are kept.
    forgotten, kept = shares.enter("key", "session 0"), shares.enter("key", "session 999")
    assert (forgotten.counter, kept.counter) == (0, 1000)
    assert len(shares.sessions_of("key")) <= MOST_IDLE_SESSIONS + 3


A, B = Tenant(name="a"), Tenant(name="b")


def call(call_id: int, tokens: int = FULL, *, tenant: Tenant = A, priority: int = 0) -> TextCall:
    return TextCall(call_id=call_id, tokens=tokens, arrived_s=0.0, tenant=tenant, priority=priority)


def order_of_calls(queue: TextQueue, now: float = 0.0) -> list[int]:
    """Return the order_of_calls in which the calls go, each when the one before it has ended."""
    ids = []
    while started := queue.start(FULL, now):
        for one in started:
            ids.append(one.call_id)
            queue.remove(one)
    return ids


def queue_of_calls(*calls: TextCall, aging_s: float = 60.0) -> TextQueue:
    queue = TextQueue(aging_s)
    for one in calls:
        queue.push(one)
    return queue


def test_a_shard_may_have_what_it_computes_and_as_much_again() -> None:
    assert [room_of(tokens) for tokens in (0, 128, 512, 16 * 128)] == [FULL, FULL, FULL, 4096]


def test_calls_go_as_far_as_there_is_room_on_all_shards() -> None:
    queue = queue_of_calls(*(call(number, FULL // 2) for number in range(7)))
    started = queue.start(2 * FULL, 0.0)
    assert [one.call_id for one in started] == [0, 1, 2, 3]
    assert queue.start(2 * FULL, 0.0) == []
    queue.remove(started[1])
    assert [one.call_id for one in queue.start(2 * FULL, 0.0)] == [4]
    assert (len(queue), queue.tokens) == (2, 2 * FULL)


def test_a_call_larger_than_the_room_goes_alone_and_nobody_passes_it() -> None:
    queue = queue_of_calls(call(0, 1), call(1, 2 * FULL), call(2, 1))
    (first,) = queue.start(FULL, 0.0)
    assert queue.start(FULL, 0.0) == []
    queue.remove(first)
    (large,) = queue.start(FULL, 0.0)
    assert large.call_id == 1
    assert queue.start(FULL, 0.0) == []


def test_without_a_shard_one_call_looks_for_one() -> None:
    queue = queue_of_calls(call(0, 1), call(1, 1))
    assert [one.call_id for one in queue.start(0, 0.0)] == [0]


def test_tenants_share_by_tokens_and_weight() -> None:
    heavy = Tenant(name="b", weight=2.0)
    crowd = [call(number) for number in range(4)]
    queue = queue_of_calls(*crowd, *(call(number, tenant=heavy) for number in range(4, 8)))
    assert order_of_calls(queue) == [0, 4, 5, 1, 6, 7, 2, 3]


def test_higher_priorities_go_first_until_others_have_aged() -> None:
    calls = (call(0), call(1, priority=3), call(2, priority=1))
    assert order_of_calls(queue_of_calls(*calls)) == [1, 2, 0]
    late = TextCall(call_id=3, tokens=FULL, arrived_s=240.0, priority=3)
    assert order_of_calls(queue_of_calls(call(0), late), now=240.0) == [0, 3]


def test_callers_leave() -> None:
    calls = [call(number) for number in range(3)]
    queue = queue_of_calls(*calls)
    queue.remove(calls[1])
    queue.remove(calls[1])
    assert order_of_calls(queue) == [0, 2]
    assert (len(queue), queue.tokens) == (0, 0)


@given(st.lists(st.one_of(CALLS, st.integers(0, 30)), max_size=60), st.integers(0, 3))
def test_every_call_goes_once_and_the_room_is_kept(events: list[tuple[int, Tenant, int] | int], shards: int) -> None:
    """An event is a call, or the place of one that ends or leaves."""
    queue, known, started = TextQueue(60.0), list[TextCall](), set[int]()

    def start(now: float) -> None:
        for one in queue.start(shards * FULL, now):
            assert one.call_id not in started
            started.add(one.call_id)
            under_way = [other for other in known if other.call_id in started]
            assert len(under_way) == 1 or sum(other.tokens for other in under_way) <= shards * FULL

    for now, event in enumerate(events):
        if isinstance(event, tuple):
            tokens, tenant, priority = event
            known.append(TextCall(call_id=now, tokens=tokens, arrived_s=float(now), tenant=tenant, priority=priority))
            queue.push(known[-1])
        elif event < len(known):
            queue.remove(known.pop(event))
        start(float(now))
        assert len(queue) == sum(one.call_id not in started for one in known)
        # Something is under way whenever anything waits.
        assert not known or any(one.call_id in started for one in known)
    while known:
        ended = next(one for one in known if one.call_id in started)
        known.remove(ended)
        queue.remove(ended)
        start(float(len(events)))
    assert (len(queue), queue.tokens) == (0, 0)
