"""What follows a bug of the scheduler: its request fails alone, or nobody if nobody knows which it is."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caravan_scheduler import recovery
from caravan_scheduler.actions import Fail, FailureReason, Faulted, Flushed, Left, PinAnswered
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import BeamSearch, EarlyStopping
from caravan_scheduler.events import (
    ActionFailed,
    Event,
    FlushRequested,
    PinRequested,
    Replaced,
    ShardLost,
    Submitted,
    Taken,
    Tick,
)
from caravan_scheduler.pins import Pin
from caravan_scheduler.planning.step_plan import StepPlan
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.resident import Resident
from caravan_studio.recording.recorder import Recorder
from caravan_testing.bugs import FaultySimulation, InjectedError, bugged, functions, modules
from caravan_testing.ledgers import SAVING, limits_of
from caravan_testing.recorded import differences, recorded
from caravan_testing.requests import prompt_of, request

_SEARCH = BeamSearch(
    width=2, index=0, length_penalty=1.0, early_stopping=EarlyStopping.NO, eos_token_ids=frozenset(range(0, 97, 7))
)
_BAD = prompt_of(9, 77)


_FUNCTIONS = functions(modules("planning", "waiting", "beams"))
# One of each kind runs with all tests.
_FEW = (
    "planning.planner.Planner.plan",
    "planning.placement.choose",
    "waiting.queue.WaitingQueue.push",
    "beams.BeamGroup.advance",
)
_CASES = [pytest.param(name, marks=() if name in _FEW else pytest.mark.slow, id=name) for name in sorted(_FUNCTIONS)]


def _simulation(*shards: str, **config: Any) -> FaultySimulation:
    simulation = FaultySimulation(SchedulerConfig(**config))
    for name in shards or ("a",):
        limits = limits_of(max_sequences=3, max_batch_tokens=32, max_prompt_logprob_tokens=16, **SAVING)
        simulation.join(name, limits)
    return simulation


def _found(target: str) -> Any:
    """Return what a dotted name names, in a module or in a class of one."""
    owner, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(owner), name)
    except ModuleNotFoundError:
        return getattr(_found(owner), name)


def _raising_for_bad(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Return a function that raises an exception where the argument at ``place`` has the bad prompt."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(args[place], "sequence", args[place]).spec.prompt == _BAD:
            raise InjectedError
        return function(*args, **kwargs)

    return call


def _raise(*_args: Any, **_kwargs: Any) -> None:
    raise InjectedError


@pytest.mark.parametrize(
    ("target", "place", "is_rebuilt"),
    [
        ("caravan_scheduler.state.Sequence", 0, False),
        ("caravan_scheduler.planning.admission.choose", 2, False),
        ("caravan_scheduler.planning.step_plan.StepPlan._add_chunk", 1, True),
        ("caravan_scheduler.planning.step_plan.parameters_of", 0, True),
        ("caravan_scheduler.state.SchedulerState.branch", 1, True),
    ],
)
def test_a_request_that_meets_a_bug_fails_alone(
    target: str, place: int, is_rebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = _simulation("a", "b")
    others = [simulation.submit(prompt_of(20, number), 12, ignore_eos=True) for number in range(4)]
    simulation.advance("a", 3)
    monkeypatch.setattr(target, _raising_for_bad(_found(target), place))
    bad = simulation.submit(_BAD, 3, ignore_eos=True)
    others.append(simulation.submit(prompt_of(20, 9), 12, ignore_eos=True))
    simulation.settle()
    assert simulation.failed == {bad: FailureReason.FAULT}
    assert simulation.finished == set(others)
    assert [(fault.request_ids, fault.is_rebuilt) for fault in simulation.faults] == [((bad,), is_rebuilt)]


def test_a_beam_search_fails_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = _simulation()
    monkeypatch.setattr("caravan_scheduler.beams.BeamGroup.advance", _raise)
    other = simulation.submit(prompt_of(20), 4, ignore_eos=True)
    search = simulation.submit_beams(prompt_of(8), 6, _SEARCH)
    simulation.settle()
    assert simulation.failed == dict.fromkeys(search, FailureReason.FAULT)
    assert simulation.finished == {other}


def test_a_search_that_ended_before_the_bug_keeps_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = _simulation()
    apply = Scheduler._apply

    def raising_at_the_end(self: Scheduler, event: Event) -> bool:
        result = apply(self, event)
        if isinstance(event, Submitted) and event.request.spec.beams is not None and self.sequences == {}:
            raise InjectedError
        return result

    monkeypatch.setattr(Scheduler, "_apply", raising_at_the_end)
    search = simulation.submit_beams(prompt_of(8), 6, replace(_SEARCH, width=4))
    assert simulation.failed == dict.fromkeys(search, FailureReason.DOES_NOT_FIT), "a shard has three sequences"
    assert len(simulation.faults) == 1
    simulation.settle()


def test_requests_keep_their_tokens_when_nobody_knows_whose_bug_it_is() -> None:
    simulation = _simulation("a", "b")
    running = [simulation.submit(prompt_of(20, number), 12, ignore_eos=True) for number in range(4)]
    search = simulation.submit_beams(prompt_of(8), 6, _SEARCH)
    for _ in range(4):
        simulation.advance("a")
        simulation.advance("b")
    assert any(simulation.received[request_id] for request_id in running)
    simulation.handle(ActionFailed())
    assert [(fault.request_ids, fault.is_rebuilt) for fault in simulation.faults] == [((), True)]
    assert simulation.failed == {}
    simulation.settle()
    assert simulation.finished == {*running, *search}


def test_all_requests_end_if_not_even_an_empty_scheduler_can_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = _simulation()
    running = [simulation.submit(prompt_of(20, number), 12, ignore_eos=True) for number in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr("caravan_scheduler.planning.planner.Planner.plan", _raise)
        actions = recovery.handle(simulation.scheduler, [Tick()], simulation.now)
    assert [one.is_rebuilt for one in actions if isinstance(one, Faulted)] == [True, True]
    assert {one.request_id for one in actions if isinstance(one, Fail)} == set(running)
    assert not simulation.scheduler.sequences
    assert recovery.handle(simulation.scheduler, [Tick()], simulation.now) == []


def test_requests_that_break_the_scheduler_again_and_again_end() -> None:
    simulation = _simulation(max_losses=2)
    waiting = simulation.submit(prompt_of(20), 12, ignore_eos=True)
    for failed in ({}, {}, {waiting: FailureReason.FAULT}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("caravan_scheduler.scheduler.Scheduler._note_fleet_change", _raise)
            recovery_actions = recovery.handle(simulation.scheduler, [ActionFailed()], simulation.now)
        for action in recovery_actions:
            if not isinstance(action, Faulted):
                simulation._execute(action)
        assert simulation.failed == failed


@pytest.mark.parametrize(
    "asked",
    [
        PinRequested(1, Pin(key=b"k", length=1, tokens=(1,), tenant="", adapter="")),
        FlushRequested(1, frozenset({"a"})),
        Replaced(),
        Taken((Sequence(request(7, (1, 2), 3)),)),
        Submitted(request(7, (1, 2), 3)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_is_asked_for_with_a_bug_is_answered(asked: Event) -> None:
    scheduler = Scheduler(SchedulerConfig())
    first = Submitted(request(1, (1, 2, 3), 4))
    actions = recovery.handle(scheduler, [first, ShardLost("a"), ActionFailed(), asked], 0.0)
    assert [one.is_rebuilt for one in actions if isinstance(one, Faulted)] == [True]
    match asked:
        case Replaced():
            (left,) = (one for one in actions if isinstance(one, Left))
            assert [sequence.request_id for sequence in left.sequences] == [1]
        case PinRequested():
            assert PinAnswered(1, None) in actions
            assert [pin.key for pin in scheduler.pins] == [b"k"]
        case FlushRequested():
            assert Flushed(1, ()) in actions
        case _:
            assert sorted(scheduler.sequences) == [1, 7]


def test_a_recording_of_a_bug_is_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SchedulerConfig()
    simulation = FaultySimulation(config)
    recorder = Recorder(tmp_path / "recording")
    simulation.scheduler = recorded(simulation.scheduler, config, recorder)
    simulation.join("a", limits_of(**SAVING))
    add_chunk = StepPlan._add_chunk

    def raising(plan: StepPlan, resident: Resident) -> None:
        if len(resident.sequence.spec.prompt) == len(_BAD):
            raise InjectedError
        add_chunk(plan, resident)

    monkeypatch.setattr(StepPlan, "_add_chunk", raising)
    other = simulation.submit(prompt_of(20), 12, ignore_eos=True)
    simulation.advance("a")
    simulation.complete(_BAD, 3)
    assert simulation.finished == {other}
    assert simulation.faults
    recorder.close()
    assert differences(tmp_path / "recording") == []


def _play(simulation: FaultySimulation) -> None:
    """Let requests of all kinds wait, run, make way for others, move, and end."""
    simulation.submit(prompt_of(40), 30, ignore_eos=True, priority=-1)
    simulation.submit(prompt_of(20, 2), 20, ignore_eos=True, max_draft_tokens=2)
    simulation.advance("a", 4)
    simulation.submit_beams(prompt_of(8, 3), 6, _SEARCH)
    simulation.submit(prompt_of(30, 4), 4, prompt_logprobs=True)
    for _ in range(6):
        simulation.submit(prompt_of(40), 3, priority=1)
    for name in ("a", "b", "a", "a", "b"):
        simulation.advance(name)
    simulation.drain("b")
    simulation.run()
    for name in {"a", "b"} - set(simulation.shards):
        simulation.join(name, limits_of(max_sequences=3, max_batch_tokens=32, **SAVING))
    simulation.complete(prompt_of(40), 3)
    simulation.tick(1.0)
    simulation.run()
    assert list(simulation.scheduler.reasons_to_wait(simulation.now)) == []


@pytest.mark.parametrize("name", _CASES)
def test_each_function_may_raise(name: str) -> None:
    simulation = _simulation("a", "b")
    with bugged(simulation.bug, {name: _FUNCTIONS[name]}):
        simulation.bug.countdown = 0
        _play(simulation)
        was_called = simulation.bug.raised_in == name
    simulation.bug.countdown = None
    simulation.check_at_rest()
    simulation.check_failed()
    assert bool(simulation.faults) == was_called
