"""Tokens are shared by weight however many requests a tenant or a session submits; every request starts some time."""

import math
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from caravan_scheduler.actions import Start
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.waiting.fair_share import FairShare
from caravan_scheduler.waiting.queue import NotNow, WaitingQueue, effective_priority
from caravan_testing.ledgers import limits_of
from caravan_testing.requests import prompt_of, request
from caravan_testing.simulation import Simulation

TENANTS = tuple(Tenant(name=name, weight=weight) for name, weight in (("a", 1.0), ("b", 1.0), ("c", 2.0)))


def waiting(
    request_id: int, tenant: Tenant, *, prompt: int = 1, output: int = 1, priority: int = 0, arrived_s: float = 0.0
) -> Sequence:
    made = request(request_id, (1,) * prompt, output, priority=priority, tenant=tenant, arrived_s=arrived_s)
    return Sequence(made)


class Service:
    """Runs up to ``places`` sequences, each of which gets a token a step. Tokens are charged as they are served."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.fair_share = FairShare()
        self.queue = WaitingQueue(8, math.inf, self.fair_share)
        self.waits: Counter[Tenant] = Counter()
        self.submitted: Counter[Tenant] = Counter()
        self.served: Counter[Tenant] = Counter()
        self._running: dict[Sequence, int] = {}

    def submit(self, tenant: Tenant, prompt: int, output: int) -> None:
        active = +self.waits + Counter(sequence.spec.tenant for sequence in self._running)
        if tenant not in active:
            self.fair_share.activate(tenant.name, [one.name for one in active])
        self.waits[tenant] += 1
        self.submitted[tenant] += 1
        self.queue.push(waiting(self.submitted.total(), tenant, prompt=prompt, output=output))

    def step(self) -> None:
        while len(self._running) < self.places and (taken := self.queue.pop_fitting(lambda sequence: "place")):
            spec = taken[0].spec
            self.waits[spec.tenant] -= 1
            self._serve(spec.tenant, len(spec.prompt))
            self._running[taken[0]] = spec.stopping.max_new_tokens
        for sequence in list(self._running):
            self._serve(sequence.spec.tenant, 1)
            self._running[sequence] -= 1
            if not self._running[sequence]:
                del self._running[sequence]

    def _serve(self, tenant: Tenant, tokens: int) -> None:
        self.served[tenant] += tokens
        self.fair_share.charge(tenant, tokens)


def share(service: Service, rng: random.Random, light: Tenant, heavy: Tenant, tokens: int, size: int = 20) -> float:
    """Return the part of ``tokens`` that ``light`` gets while both wait; ``heavy`` submits 20 requests to one."""
    before = service.served.copy()
    while (service.served - before).total() < tokens:
        while service.waits[light] <= service.places:
            service.submit(light, rng.randint(1, 40), rng.randint(1, 20))
        while service.waits[heavy] <= service.places or service.submitted[heavy] < 20 * service.submitted[light]:
            service.submit(heavy, rng.randint(1, 2 * size), rng.randint(1, size))
        service.step()
    served = service.served - before
    return served[light] / served.total()


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    places=st.integers(1, 6),
    size=st.sampled_from([1, 5, 20, 40]),
    weight=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_tokens_are_shared_by_weight_though_one_submits_twenty_times_more(
    seed: int, places: int, size: int, weight: float
) -> None:
    light, heavy = Tenant(name="light", weight=weight), Tenant(name="heavy")
    part = share(Service(places), random.Random(seed), light, heavy, tokens=5000, size=size)
    assert abs(part - weight / (weight + 1)) < 0.04


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), places=st.integers(1, 6))
def test_idling_earns_no_more_than_the_fair_share_later(seed: int, places: int) -> None:
    rng = random.Random(seed)
    idler, other, heavy = (Tenant(name=name) for name in ("idler", "other", "heavy"))
    service = Service(places)
    share(service, rng, idler, heavy, tokens=300)
    while service.waits[idler]:
        service.step()
    share(service, rng, other, heavy, tokens=2000)
    while service.waits[other]:
        service.step()
    assert abs(share(service, rng, idler, heavy, tokens=3000) - 0.5) < 0.05


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    aging_s=st.sampled_from([1.0, 2.5, 10.0]),
    highest=st.integers(0, 4),
    backlog=st.integers(0, 20),
)
def test_nobody_starves_while_higher_priorities_keep_arriving(
    seed: int, aging_s: float, highest: int, backlog: int
) -> None:
    """All requests are of one tenant: between tenants fair share decides."""
    rng = random.Random(seed)
    queue = WaitingQueue(0, aging_s, FairShare())
    for request_id in range(backlog):
        queue.push(waiting(request_id, TENANTS[0]))
    for second in range(300):  # each second one request arrives and one starts: the backlog stays
        # Mostly the highest: without aging lower ones would never start.
        priority = highest if rng.random() < 0.9 else rng.randint(0, highest)
        queue.push(waiting(backlog + second, TENANTS[0], priority=priority, arrived_s=float(second)))
        assert queue.pop_fitting(lambda sequence: "place", float(second)) is not None
        # Only requests that arrived before its priority passed the highest may have started first.
        for sequence in queue:
            lead_s = (highest - sequence.spec.priority + 1) * aging_s
            assert second - sequence.request.arrived_s <= backlog + lead_s + 1


class Sessions:
    """Two sessions of one key on a shard with ``places``: one always has ``many`` requests, the other one at a time."""

    def __init__(self, places: int, many: int, size: tuple[int, int]) -> None:
        self.run = Simulation(SchedulerConfig(max_batch_size=places))
        self.run.join("a", limits_of(cells=4000, cells_per_sequence=400, max_sequences=8))
        self._many, self._size = many, size
        self._of_flood: list[int] = []
        self._refill()

    def _submit(self, session: str, size: tuple[int, int]) -> int:
        prompt, output = size
        # Each begins with another token, so that nothing is cached.
        prompt_tokens = prompt_of(prompt, seed=len(self.run.requests) + 1)
        return self.run.submit(prompt_tokens, output, ignore_eos=True, session=session)

    def _refill(self) -> None:
        self._of_flood = [one for one in self._of_flood if one not in self.run.finished]
        while len(self._of_flood) < self._many:
            self._of_flood.append(self._submit("flood", self._size))

    def step(self) -> None:
        self.run.advance("a")
        self._refill()

    def started_before_one(self, size: tuple[int, int]) -> list[int]:
        """Submit a request of the other session and wait for its end. Return what has started while it waited."""
        since = len(self.run.actions)
        one = self._submit("one", size)
        while one not in self.run.finished:
            self.step()
        started = [start.request_id for start in self.run.sent(Start, since=since)]
        return started[: started.index(one)]


@settings(max_examples=20)
@given(
    places=st.integers(1, 3),
    size=st.tuples(st.integers(8, 60), st.integers(4, 12)),
    part=st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.0)),
    pauses=st.lists(st.integers(0, 15), min_size=3, max_size=6),
)
def test_beside_sixteen_requests_of_a_session_another_waits_as_beside_one(
    places: int, size: tuple[int, int], part: tuple[float, float], pauses: list[int]
) -> None:
    """It waits for the first of the running requests to end. Those that wait let it pass."""
    small = (max(4, int(size[0] * part[0])), max(1, int(size[1] * part[1])))
    sessions = Sessions(places, 16, size)
    for pause in pauses:
        for _ in range(pause):
            sessions.step()
        assert sessions.started_before_one(small) == []


SEQUENCES = st.lists(
    st.tuples(
        st.integers(0, 2),  # priority
        st.sampled_from(TENANTS),
        st.integers(0, 30),  # arrival, seconds
        st.booleans(),  # started
    ),
    max_size=12,
)


@settings(max_examples=150)
@given(
    entries=SEQUENCES,
    charged=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    aging_s=st.sampled_from([5.0, 15.0, math.inf]),
    data=st.data(),
)
def test_the_order_is_total_and_that_of_the_pops(
    entries: list[tuple[int, Tenant, int, bool]], charged: list[int], aging_s: float, data: st.DataObject
) -> None:
    fair_share = FairShare()
    for tenant, tokens in zip(TENANTS, charged, strict=True):
        fair_share.charge(tenant, tokens)
    arrivals = sorted(arrived for _, _, arrived, _ in entries)
    sequences = []
    for request_id, (arrived, (priority, tenant, _, started)) in enumerate(zip(arrivals, entries, strict=True)):
        sequence = waiting(request_id, tenant, priority=priority, arrived_s=arrived)
        sequence.started = started
        sequences.append(sequence)
    queue = WaitingQueue(0, aging_s, fair_share)
    for sequence in data.draw(st.permutations(sequences)):
        queue.push(sequence)

    def rank(sequence: Sequence) -> tuple[float, ...]:
        one = sequence.request
        return (
            -min(effective_priority(one, 30.0, aging_s), max(other.spec.priority for other in queue)),
            not sequence.started,
            fair_share.counter(one.spec.tenant),
            one.request_id,
        )

    for _ in sequences:
        expected = sorted(queue, key=rank)
        assert list(queue.in_order(30.0)) == expected
        assert queue.pop_fitting(lambda sequence: "place", 30.0) == (expected[0], "place")
    assert queue.pop_fitting(lambda sequence: "place", 30.0) is None


ANSWERS: list[str | NotNow] = ["place", NotNow.PREFIX_COMING, NotNow.NO_ROOM, NotNow.NO_ROOM]


@settings(max_examples=150)
@given(max_bypass=st.integers(0, 3), steps=st.integers(1, 30), data=st.data())
def test_bypass_is_bounded(max_bypass: int, steps: int, data: st.DataObject) -> None:
    fair_share = FairShare()
    queue = WaitingQueue(max_bypass, 4.0, fair_share)
    for now in range(steps):
        priority, tenant = data.draw(st.integers(0, 2)), data.draw(st.sampled_from(TENANTS))
        queue.push(waiting(now, tenant, priority=priority, arrived_s=float(now)))
        answers: dict[Sequence, str | NotNow] = {sequence: data.draw(st.sampled_from(ANSWERS)) for sequence in queue}
        order = list(queue.in_order(float(now)))
        before = {sequence: sequence.bypassed for sequence in order}
        taken = queue.pop_fitting(answers.__getitem__, float(now))
        ahead = order[: order.index(taken[0])] if taken is not None else order
        refused = [sequence for sequence in ahead if answers[sequence] is NotNow.NO_ROOM]
        exhausted = any(before[sequence] == max_bypass for sequence in refused)
        if taken is None:
            assert exhausted or "place" not in answers.values()
        else:
            assert not exhausted
            assert all(answers[sequence] != "place" for sequence in ahead)
            fair_share.charge(taken[0].spec.tenant, 10)
        for sequence in order:
            assert sequence.bypassed == before[sequence] + (taken is not None and sequence in refused) <= max_bypass
