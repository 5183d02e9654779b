"""Requests for which a model computes no numbers end by name, and leave nothing that others could begin with."""

import math
from dataclasses import replace
from typing import Any

import pytest

from caravan_proto.messages.results import StepOutcome
from caravan_scheduler.actions import Deliver, FailureReason
from caravan_scheduler.core.generation import BeamSearch, EarlyStopping
from caravan_scheduler.core.tokens import Alternative
from caravan_scheduler.events import Stepped
from caravan_testing.requests import prompt_of
from caravan_testing.simulation import Simulation, simulation


def _advance(sim: Simulation, **changes: Any) -> None:
    """Let the shard run a step whose report is changed so; ``changes`` of the first request's sequence id 0."""
    sim.now += 0.01
    for event in sim.shards["a"].advance():
        sim.handle(replace(event, **changes) if isinstance(event, Stepped) else event)


def test_a_request_without_logits_fails_and_its_cells_are_not_kept() -> None:
    sim = simulation()
    bad = sim.submit(prompt_of(40), 8, ignore_eos=True)
    _advance(sim, tokens=(), without_logits=(0,))
    assert sim.failed == {bad: FailureReason.NO_LOGITS}
    sim.run()
    assert not sim.scheduler.shards["a"].stays.parked
    assert sim.scheduler.shards["a"].cells.held == 0
    good = sim.submit(prompt_of(40), 8, ignore_eos=True)
    sim.run()
    assert sim.finished == {good}


def test_prompt_logprobs_without_numbers_are_neither_delivered_nor_known_to_others() -> None:
    sim = simulation()
    bad = sim.submit(prompt_of(40), 8, prompt_logprobs=True)
    _advance(sim, without_logits=(0,))
    assert sim.failed == {bad: FailureReason.NO_LOGITS}
    assert not [one for one in sim.actions if isinstance(one, Deliver)]
    assert sim.scheduler._state.known_logprobs.size == 0


@pytest.mark.parametrize(
    "likeliest", [(), (Alternative(5, b"x", False, math.nan),), (Alternative(5, b"x", False, math.inf),)]
)
def test_a_beam_search_without_logits_fails_as_a_whole(likeliest: tuple[Alternative, ...]) -> None:
    sim = simulation()
    ends = frozenset(range(0, 97, 7))
    search = BeamSearch(width=2, index=0, length_penalty=1.0, early_stopping=EarlyStopping.NO, eos_token_ids=ends)
    ids = sim.submit_beams(prompt_of(8), 6, search)
    (name,) = sim.shards
    for event in sim.shards[name].advance():
        if isinstance(event, Stepped):
            assert event.outcome is StepOutcome.OK
            event = replace(event, evaluations=tuple((key, likeliest) for key, _ in event.evaluations))
        sim.handle(event)
    assert sim.failed == dict.fromkeys(ids, FailureReason.NO_LOGITS)
    sim.run()


def test_a_beam_search_whose_next_tokens_all_end_it_ends() -> None:
    sim = simulation()
    search = BeamSearch(
        width=2, index=0, length_penalty=1.0, early_stopping=EarlyStopping.NO, eos_token_ids=frozenset(range(97))
    )
    ids = sim.submit_beams(prompt_of(8), 6, search)
    sim.run()
    assert sim.finished == set(ids)
