"""Exceptions anywhere in the scheduler: the request that meets one fails, all others complete, and nothing leaks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from caravan_scheduler.config import PrefillMode, SchedulerConfig
from caravan_scheduler.core.generation import BeamSearch, EarlyStopping
from caravan_testing.bugs import FaultySimulation, bugged, functions, modules
from caravan_testing.examples import examples
from caravan_testing.ledgers import limits_of

pytestmark = pytest.mark.examples

# What the scheduler decides with, and what it notes. Not what tells clients, nor what goes on after a bug.
_FUNCTIONS = {
    name: one
    for name, one in functions(
        modules("planning", "waiting", "shard", "state", "failures", "results", "scheduler", "beams",
                "prefix_tree", "prefix_keys", "transfers", "encodings", "known_logprobs", "sequence")
    ).items()
    if not name.startswith(
        (
            # The wall itself.
            "state.SchedulerState.after_fault", "scheduler.Scheduler.begin_anew", "state.SchedulerState.expel",
            "state.SchedulerState.requests_with", "scheduler.Scheduler.state", "scheduler.Scheduler.handle",
            # They are read by tests and recordings.
            "scheduler.Scheduler.shards", "scheduler.Scheduler.sequences", "scheduler.Scheduler.waiting",
            "scheduler.Scheduler.pins", "scheduler.Scheduler.runs_under_way", "transfers.Transfers.runs_under_way",
        )
    )
}  # fmt: skip
_PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=60)


class FaultMachine(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from(PrefillMode),
        ids=st.integers(1, 4),
        cells=st.integers(60, 200),
        memory=st.sampled_from([0, 300]),
        shards=st.integers(1, 3),
    )
    def begin(self, mode: PrefillMode, ids: int, cells: int, memory: int, shards: int) -> None:
        config = SchedulerConfig(
            mode=mode, run_ahead_steps=4, run_ahead_s=0.0, max_losses=10**6, max_fatal_losses=10**6
        )
        self.simulation = FaultySimulation(config)
        self.limits = limits_of(
            cells=cells, cells_per_sequence=cells, max_sequences=ids, max_batch_tokens=32, memory_bytes=memory
        )
        self.names = [f"shard {number}" for number in range(shards)]
        for name in self.names:
            self.simulation.join(name, self.limits)
        self.bug = self.simulation.bug
        self.context = bugged(self.bug, _FUNCTIONS)
        self.context.__enter__()

    @rule(countdown=st.integers(0, 60) | st.integers(0, 1000), after=st.booleans())
    def strike(self, countdown: int, after: bool) -> None:
        self.bug.countdown, self.bug.after = countdown, after

    @rule(
        prompt=_PROMPTS,
        new=st.integers(1, 20),
        priority=st.integers(-1, 1),
        logprobs=st.booleans(),
        drafts=st.sampled_from([0, 2]),
        copies=st.sampled_from([1, 1, 3]),
    )
    def submit(self, prompt: list[int], new: int, priority: int, logprobs: bool, drafts: int, copies: int) -> None:
        for _ in range(copies):
            self.simulation.submit(
                tuple(prompt), new, priority=priority, prompt_logprobs=logprobs, max_draft_tokens=drafts
            )

    @rule(prompt=_PROMPTS, new=st.integers(1, 10), width=st.integers(1, 3))
    def submit_beams(self, prompt: list[int], new: int, width: int) -> None:
        ends = frozenset(range(0, 97, 7))
        search = BeamSearch(
            width=width, index=0, length_penalty=1.0, early_stopping=EarlyStopping.NO, eos_token_ids=ends
        )
        self.simulation.submit_beams(tuple(prompt), new, search)

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.simulation.cancel(data.draw(st.sampled_from(sorted(self.simulation.requests))))

    @precondition(lambda self: self.simulation.shards)
    @rule(data=st.data(), steps=st.integers(1, 8))
    def advance(self, data: st.DataObject, steps: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.simulation.shards)))
        self.simulation.advance(name, steps)

    @precondition(lambda self: len(self.simulation.shards) > 1)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.simulation.lose(data.draw(st.sampled_from(sorted(self.simulation.shards))))

    @precondition(lambda self: len(self.simulation.shards) < len(self.names))
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.names) - set(self.simulation.shards))))
        self.simulation.join(name, self.limits)

    @rule(seconds=st.sampled_from([0.5, 10.0]))
    def tick(self, seconds: float) -> None:
        self.simulation.tick(seconds)

    @rule()
    def rest(self) -> None:
        self.simulation.run()

    def teardown(self) -> None:
        if not hasattr(self, "context"):
            return
        self.bug.countdown = None
        self.context.__exit__(None, None, None)
        self.simulation.settle()
        self.simulation.check_failed()


TestFaultMachine = FaultMachine.TestCase
TestFaultMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)
