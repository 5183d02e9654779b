"""Prompts depend only on the seed and share no prefix by accident."""

from itertools import combinations

import pytest

from caravan_serve.bench.runner import poisson_arrivals
from caravan_serve.bench.workloads import Shape, Workload, phases, stall_plan, warm_up

PHASED = [workload for workload in Workload if workload is not Workload.STALL]


@pytest.mark.parametrize("workload", PHASED)
def test_the_same_seed_gives_the_same_prompts(workload: Workload) -> None:
    assert phases(workload, Shape(seed=3)) == phases(workload, Shape(seed=3))
    assert phases(workload, Shape(seed=3)) != phases(workload, Shape(seed=4))


def test_prompts_of_the_plain_workload_share_no_prefix() -> None:
    (phase,) = phases(Workload.PLAIN, Shape())
    assert len(phase.requests) == 64
    for one, other in combinations(phase.requests, 2):
        assert one.prompt.split()[:4] != other.prompt.split()[:4]


def test_prompts_have_the_requested_sizes() -> None:
    (phase,) = phases(Workload.PLAIN, Shape(words=5, tokens=3, requests=2))
    assert [(len(request.prompt.split()), request.max_tokens) for request in phase.requests] == [(5, 3), (5, 3)]


def test_prompts_of_the_shared_prefix_workload_differ_only_in_their_tails() -> None:
    cold, warm = phases(Workload.SHARED_PREFIX, Shape(concurrency=8))
    prompts = [request.prompt.split() for request in (*cold.requests, *warm.requests)]
    assert (cold.name, warm.name, len(prompts)) == ("cold", "warm", 16)
    assert len({tuple(prompt[:600]) for prompt in prompts}) == 1
    assert len({tuple(prompt[600:]) for prompt in prompts}) == 16


def test_a_returning_prefix_comes_once_before_the_other_prompts_and_once_after_them() -> None:
    cold, between, warm = phases(Workload.RETURNING_PREFIX, Shape(requests=2, between=7))
    assert (cold.concurrency, between.concurrency, warm.concurrency) == (1, None, 1)
    assert len(between.requests) == 7
    for first, again in zip(cold.requests, warm.requests, strict=True):
        assert first.prompt.split()[:600] == again.prompt.split()[:600]
        assert first.prompt != again.prompt
    assert cold.requests[0].prompt.split()[:4] != cold.requests[1].prompt.split()[:4]


def test_the_n_workload_asks_for_n_choices() -> None:
    (phase,) = phases(Workload.N, Shape(n=5))
    assert {request.n for request in phase.requests} == {5}


def test_stall_streams_are_longer_than_the_long_prompts_output() -> None:
    plan = stall_plan(Shape())
    assert len(plan.streams) == 4
    assert len(plan.intruder.prompt.split()) == 1500
    assert min(stream.max_tokens for stream in plan.streams) > plan.intruder.max_tokens


def test_warm_up_prompts_are_not_measured_prompts() -> None:
    (phase,) = phases(Workload.PLAIN, Shape())
    warm = warm_up(Shape(), 2)
    assert not {request.prompt for request in warm} & {request.prompt for request in phase.requests}


def test_poisson_arrivals_have_the_requested_rate() -> None:
    arrivals = poisson_arrivals(4000, rate=2.5, seed=1)
    assert arrivals == poisson_arrivals(4000, rate=2.5, seed=1)
    assert arrivals != poisson_arrivals(4000, rate=2.5, seed=2)
    assert list(arrivals) == sorted(arrivals)
    assert 4000 / arrivals[-1] == pytest.approx(2.5, rel=0.05)
