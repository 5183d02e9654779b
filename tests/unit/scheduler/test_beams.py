"""Beam searches: which beams continue, what they hold, and how they end."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caravan_proto.messages.commands import Evaluate, Save
from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_proto.messages.results import StepOutcome
from caravan_scheduler.actions import Preempt
from caravan_scheduler.beams import BeamGroup
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import BeamSearch, EarlyStopping
from caravan_scheduler.core.tokens import Alternative
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.sequence import Sequence
from caravan_testing.beam_oracle import EOS_TOKEN_IDS, beam_outputs, logprobs_after
from caravan_testing.requests import request
from caravan_testing.simulation import Simulation

_RECORD = json.loads((Path(__file__).parent / "beams_of_transformers.json").read_text())
_ENDS = frozenset({0, 5, 11})


def limits(cells: int = 400, ids: int = 8, *, shares_cells: bool = True) -> ShardLimits:
    per_sequence = cells if shares_cells else cells // ids
    layout = LayoutLimits(
        cells=cells, cells_per_sequence=per_sequence, layout=(KvLayout.SPLIT, KvLayout.UNIFIED)[shares_cells]
    )
    return ShardLimits(layout=layout, max_sequences=ids, max_batch_tokens=64)


def search(width: int, penalty: float = 1.0, early: EarlyStopping = EarlyStopping.NO) -> BeamSearch:
    return BeamSearch(width=width, index=0, length_penalty=penalty, early_stopping=early, eos_token_ids=_ENDS)


def _group(case: dict[str, Any]) -> BeamGroup[Sequence]:
    beams = BeamSearch(
        width=case["width"],
        index=0,
        length_penalty=case["length_penalty"],
        early_stopping=EarlyStopping(case["early_stopping"]),
        eos_token_ids=frozenset(EOS_TOKEN_IDS),
    )
    made = request(1, case["prompt"], case["new"])
    group = BeamGroup(Sequence(replace(made, spec=replace(made.spec, beams=beams))))
    for index in range(1, beams.width):
        member = replace(made, spec=replace(made.spec, beams=replace(beams, index=index)))
        group.join(Sequence(member))
    return group


def _likeliest(tokens: tuple[int, ...], count: int) -> tuple[Alternative, ...]:
    logprobs = logprobs_after(tokens)
    best = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])[:count]
    return tuple(Alternative(token, b"", False, logprobs[token]) for token in best)


@pytest.mark.parametrize("case", _RECORD["cases"], ids=lambda case: "-".join(map(str, list(case.values())[1:5])))
def test_outputs_and_scores_are_those_of_transformers(case: dict[str, Any]) -> None:
    group = _group(case)
    while True:
        beams = [group.members[index] for index in group.beams]
        for member in beams:
            likeliest = _likeliest(member.tokens(0, member.known_tokens), group.top_n_tokens)
            assert group.note_next(member, likeliest) == (member is beams[-1])
        if group.advance() is None:
            break
        for member in group.members:
            group.note_placed(member)
    found = group.best()
    assert [[token.token_id for token in tokens] for _, tokens in found] == case["outputs"]
    for score, expected in zip([score for score, _ in found], case["scores"], strict=False):
        assert math.isclose(score, expected, abs_tol=2e-4)
    reference = beam_outputs(logprobs_after, group.leader.spec)
    assert [list(one.tokens) for one in reference] == case["outputs"]


def simulation(*shards: ShardLimits) -> Simulation:
    made = Simulation(SchedulerConfig())
    for number, one in enumerate(shards or (limits(),)):
        made.join(f"s{number}", one)
    return made


@pytest.mark.parametrize("shares_cells", [True, False])
@pytest.mark.parametrize("early", list(EarlyStopping))
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_outputs_are_those_of_the_reference(
    width: int, penalty: float, early: EarlyStopping, *, shares_cells: bool
) -> None:
    made = simulation(limits(800, shares_cells=shares_cells))
    for prompt in ((1,), (2, 3, 4), tuple(range(1, 40))):
        made.submit_beams(prompt, 12, search(width, penalty, early))
        made.run()
    assert made.finished == set(made.requests)
    made.check_at_rest()


def test_a_search_takes_no_more_ids_than_it_is_wide() -> None:
    made = simulation(limits(ids=4))
    made.submit_beams((1, 2, 3), 20, search(4))
    made.run()
    assert len(made.finished) == 4
    made.check_at_rest()
    steps = made.sent(Evaluate)
    assert any(row.copy is not None for step in steps[2:] for row in step.rows), "no beam branched off"
    assert all(len(step.rows) <= 4 for step in steps)


def test_a_search_waits_until_it_has_all_its_ids() -> None:
    made = simulation(limits(ids=4))
    made.submit((7, 7), 30, ignore_eos=True)
    made.submit((8, 8), 5, ignore_eos=True)
    made.advance("s0")
    ids = made.submit_beams((1, 2, 3), 6, search(3))
    made.advance("s0")
    assert not any(isinstance(one, Evaluate) for one in made.actions)
    made.run()
    assert set(ids) <= made.finished
    made.check_at_rest()


def test_beams_and_other_requests_take_turns() -> None:
    made = simulation()
    for number in range(3):
        made.submit((9, number + 1), 20, ignore_eos=True)
    made.submit_beams((1, 2, 3), 20, search(3))
    made.submit_beams((1, 2, 4), 20, search(2))
    made.run()
    assert made.finished == set(made.requests)
    made.check_at_rest()


def test_a_search_that_fits_no_shard_fails_as_a_whole() -> None:
    made = simulation(limits(ids=2))
    ids = made.submit_beams((1, 2), 4, search(3))
    assert set(made.failed) == set(ids)
    assert not made.scheduler.sequences


@pytest.mark.parametrize("outcome", [StepOutcome.NO_KV, StepOutcome.ABORTED])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 7])
def test_failed_steps_change_no_output(after: int, outcome: StepOutcome) -> None:
    made = simulation()
    made.submit_beams((1, 2, 3), 16, search(3))
    made.advance("s0", after)
    made.shards["s0"].fail_next_step = outcome
    made.run()
    assert len(made.finished) == 3
    made.check_at_rest()


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_a_search_outlives_its_shard(steps: int) -> None:
    made = simulation()
    made.submit_beams(tuple(range(1, 30)), 16, search(4))
    made.advance("s0", steps)
    made.lose("s0")
    made.join("s1", limits(shares_cells=False, cells=800))
    made.run()
    assert len(made.finished) == 4
    made.check_at_rest()


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_one_member_that_is_cancelled_ends_the_search(steps: int) -> None:
    made = simulation()
    ids = made.submit_beams((1, 2, 3), 16, search(4))
    made.advance("s0", steps)
    made.cancel(ids[2])
    made.run()
    assert not made.scheduler.sequences
    assert not made.finished
    made.check_at_rest()


def test_a_preempted_search_comes_back_whole() -> None:
    made = simulation(limits(120, ids=5))
    ids = made.submit_beams((1, 2, 3, 4), 24, search(4))
    made.advance("s0", 6)
    made.complete(tuple(range(10, 90)), 10, priority=1, ignore_eos=True)
    assert any(isinstance(one, Preempt) and one.request_id in ids for one in made.actions)
    assert made.finished == set(made.requests)
    made.check_at_rest()


def test_a_search_leaves_a_shard_that_drains() -> None:
    made = simulation(limits())
    made.submit_beams((1, 2, 3, 4), 24, search(4))
    made.advance("s0", 6)
    made.join("s1", limits())
    made.drain("s0")
    made.run()
    assert len(made.finished) == 4
    assert list(made.shards) == ["s1"]
    made.check_at_rest()


def test_a_deadline_returns_the_best_so_far() -> None:
    made = simulation()
    ids = made.submit_beams((1, 2, 3), 50, search(3), end_by_s=0.05)
    made.advance("s0", 8)
    made.tick(1.0)
    assert all(made.received[one] for one in ids)
    assert set(ids) <= made.finished | set(made.failed)
    assert not made.scheduler.sequences


def test_a_prefix_may_be_saved_while_beams_have_yet_to_branch_off() -> None:
    split = replace(limits(75, 3, shares_cells=False).layout, saving=Saving.ANY)
    unified = replace(limits(75, 3).layout, saving=Saving.ANY)
    made = simulation(replace(limits(75, 3), layout=split, other_layout=unified, memory_bytes=60))
    # It outgrows its part of the cells, so that all cells are shared from then on.
    made.submit((1,), 30, ignore_eos=True)
    made.submit_beams((1,), 17, search(1), ignore_eos=True)
    made.submit_beams((1,), 2, search(2), ignore_eos=True)
    # Checks the invariants after each event.
    made.settle()
    assert any(isinstance(one, Save) for one in made.actions)
