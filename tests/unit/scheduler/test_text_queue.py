"""The order in which texts to embed go to shards, and how many go at once."""

from hypothesis import given
from hypothesis import strategies as st

from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.waiting.text_queue import LEAST_ROOM, TextCall, TextQueue, room_of

A, B = Tenant(name="a"), Tenant(name="b")
FULL = LEAST_ROOM


def call(call_id: int, tokens: int = FULL, *, tenant: Tenant = A, priority: int = 0) -> TextCall:
    return TextCall(call_id=call_id, tokens=tokens, arrived_s=0.0, tenant=tenant, priority=priority)


def order(queue: TextQueue, now: float = 0.0) -> list[int]:
    """Return the order in which the calls go, each when the one before it has ended."""
    ids = []
    while started := queue.start(FULL, now):
        for one in started:
            ids.append(one.call_id)
            queue.remove(one)
    return ids


def queue_of(*calls: TextCall, aging_s: float = 60.0) -> TextQueue:
    queue = TextQueue(aging_s)
    for one in calls:
        queue.push(one)
    return queue


def test_a_shard_may_have_what_it_computes_and_as_much_again() -> None:
    assert [room_of(tokens) for tokens in (0, 128, 512, 16 * 128)] == [FULL, FULL, FULL, 4096]


def test_calls_go_as_far_as_there_is_room_on_all_shards() -> None:
    queue = queue_of(*(call(number, FULL // 2) for number in range(7)))
    started = queue.start(2 * FULL, 0.0)
    assert [one.call_id for one in started] == [0, 1, 2, 3]
    assert queue.start(2 * FULL, 0.0) == []
    queue.remove(started[1])
    assert [one.call_id for one in queue.start(2 * FULL, 0.0)] == [4]
    assert (len(queue), queue.tokens) == (2, 2 * FULL)


def test_a_call_larger_than_the_room_goes_alone_and_nobody_passes_it() -> None:
    queue = queue_of(call(0, 1), call(1, 2 * FULL), call(2, 1))
    (first,) = queue.start(FULL, 0.0)
    assert queue.start(FULL, 0.0) == []
    queue.remove(first)
    (large,) = queue.start(FULL, 0.0)
    assert large.call_id == 1
    assert queue.start(FULL, 0.0) == []


def test_without_a_shard_one_call_looks_for_one() -> None:
    queue = queue_of(call(0, 1), call(1, 1))
    assert [one.call_id for one in queue.start(0, 0.0)] == [0]


def test_tenants_share_by_tokens_and_weight() -> None:
    heavy = Tenant(name="b", weight=2.0)
    crowd = [call(number) for number in range(4)]
    queue = queue_of(*crowd, *(call(number, tenant=heavy) for number in range(4, 8)))
    assert order(queue) == [0, 4, 5, 1, 6, 7, 2, 3]


def test_higher_priorities_go_first_until_others_have_aged() -> None:
    calls = (call(0), call(1, priority=3), call(2, priority=1))
    assert order(queue_of(*calls)) == [1, 2, 0]
    late = TextCall(call_id=3, tokens=FULL, arrived_s=240.0, priority=3)
    assert order(queue_of(call(0), late), now=240.0) == [0, 3]


def test_callers_leave() -> None:
    calls = [call(number) for number in range(3)]
    queue = queue_of(*calls)
    queue.remove(calls[1])
    queue.remove(calls[1])
    assert order(queue) == [0, 2]
    assert (len(queue), queue.tokens) == (0, 0)


CALLS = st.tuples(st.integers(1, 2 * FULL), st.sampled_from([A, B]), st.integers(-2, 2))


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
