"""Arrivals, cancellations, steps, failures and losses in any order break no invariant and change no output."""

import math
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from caravan_proto.messages.constraint import Thought
from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_proto.messages.results import StepOutcome
from caravan_scheduler.config import PrefillMode, SchedulerConfig
from caravan_scheduler.core.generation import BULK_PRIORITY, BeamSearch, EarlyStopping, Tenant
from caravan_scheduler.events import EncodeOutcome, ShardLimits, Unpinned
from caravan_scheduler.prefix_keys import PrefixKeys
from caravan_scheduler.shard.remembered import prefixes_of, tokens_of
from caravan_studio.recording.recorder import Recorder
from caravan_testing.examples import examples
from caravan_testing.model_media import ENCODER, in_pictures
from caravan_testing.recorded import differences, recorded
from caravan_testing.simulation import Simulation

pytestmark = [pytest.mark.examples, pytest.mark.timeout(1800)]


def _limits(
    ids: int,
    per_sequence: int,
    layouts: str,
    batch: int,
    saving: Saving,
    memory: int,
    disk: int,
    fingerprint: str,
    rollback: int = 0,
) -> ShardLimits:
    """Return few cells and ids: contention is the rule."""
    whole_only = saving is Saving.WITH_STATE
    both = {
        "split": LayoutLimits(
            cells=ids * per_sequence,
            cells_per_sequence=per_sequence,
            layout=KvLayout.SPLIT,
            whole_only=whole_only,
            rollback_tokens=rollback,
            saving=saving,
        ),
        "unified": LayoutLimits(
            cells=per_sequence,
            cells_per_sequence=per_sequence,
            whole_only=whole_only,
            rollback_tokens=rollback,
            saving=saving,
        ),
    }
    if layouts == "auto":
        both["unified"] = replace(both["unified"], cells=ids * per_sequence, cells_per_sequence=ids * per_sequence)
    return ShardLimits(
        layout=both["split" if layouts == "auto" else layouts],
        other_layout=both["unified"] if layouts == "auto" else None,
        max_sequences=ids,
        max_batch_tokens=batch,
        memory_bytes=memory,
        disk_bytes=disk,
        max_prompt_logprob_tokens=16,
        max_draft_tokens=0 if whole_only and not rollback else 16,
        # Shards with the same fingerprint have the same model: all keep recurrent state, or none does.
        run_fingerprint=f"{fingerprint} {saving.name}" if fingerprint and saving is not Saving.NOTHING else "",
        end_tokens=frozenset({2}),
        encoder=ENCODER,
    )


_LIMITS = st.builds(
    _limits,
    ids=st.integers(1, 4),
    per_sequence=st.integers(24, 80),
    layouts=st.sampled_from(["split", "unified", "auto"]),
    batch=st.integers(20, 64),
    saving=st.sampled_from(Saving),
    memory=st.sampled_from([0, 60, 300]),
    disk=st.sampled_from([0, 100]),
    fingerprint=st.sampled_from(["", "x", "x", "x"]),
)
# Shards that save any part of a sequence, and share cells.
_SAVING_LIMITS = st.builds(
    _limits,
    ids=st.integers(2, 5),
    per_sequence=st.integers(60, 160),
    layouts=st.sampled_from(["unified", "unified", "auto"]),
    batch=st.integers(20, 64),
    saving=st.just(Saving.ANY),
    memory=st.sampled_from([150, 1000]),
    disk=st.sampled_from([0, 100]),
    fingerprint=st.sampled_from(["", "x"]),
)
# Shards that save whole sequences only, where prompts pause at ends of messages: after token 2.
_CHECKPOINT_LIMITS = st.builds(
    _limits,
    ids=st.integers(1, 4),
    per_sequence=st.integers(60, 160),
    layouts=st.sampled_from(["split", "unified", "unified"]),
    batch=st.integers(20, 64),
    saving=st.just(Saving.WITH_STATE),
    memory=st.sampled_from([150, 1000]),
    disk=st.sampled_from([0, 100]),
    fingerprint=st.sampled_from(["", "x"]),
    rollback=st.sampled_from([0, 3]),
)
# Two tokens, and few beginnings: prefixes in common are the rule.
THOUGHT = Thought(closings=(b".",), ending=(7,))
_PROMPTS = (
    st.lists(st.integers(1, 2), min_size=1, max_size=60)
    | st.builds(
        lambda prefix, tail: [1] * prefix + tail,
        st.integers(1, 50),
        st.lists(st.integers(1, 2), min_size=1, max_size=6),
    )
    | st.builds(
        lambda token, length, tail: [token, *[1] * length, *tail],
        st.integers(3, 6),
        st.sampled_from([15, 31, 40]),
        st.lists(st.integers(1, 2), max_size=3),
    )
)
_TAILS = st.builds(lambda token, length: [token] * length, st.integers(1, 3), st.sampled_from([0, 3, 18, 34]))
_NAMES = ("a", "b", "c")
# Seconds until a request must have ended. A step takes 0.01 s.
_LASTING = st.sampled_from([math.inf, math.inf, math.inf, 0.05, 0.15, 1.0])


class SchedulerMachine(RuleBasedStateMachine):
    shard_limits = _LIMITS
    # Whether the router is configured to keep what it can.
    keeps_all = False
    # From how many numbers of keys on a recording forgets some.
    many_keys = 1 << 17

    @initialize(
        mode=st.sampled_from(PrefillMode),
        ratio=st.sampled_from([0.0, 0.3, 1.2]),
        max_waiting=st.integers(0, 5),
        max_batch_size=st.sampled_from([None, 1, 3]),
        run_ahead=st.integers(1, 6),
        run_ahead_s=st.sampled_from([0.0, 0.3]),
        max_bypass=st.integers(0, 3),
        prefix_caching=st.booleans(),
        max_cells=st.sampled_from([None, 40]),
        aging_s=st.sampled_from([math.inf, 0.5]),
        atomic=st.booleans(),
        picture_cells=st.sampled_from([5, 8, 19]),
        limits=st.runner().flatmap(lambda machine: st.lists(machine.shard_limits, min_size=1, max_size=3)),
    )
    def begin(
        self,
        mode: PrefillMode,
        ratio: float,
        max_waiting: int,
        max_batch_size: int | None,
        run_ahead: int,
        run_ahead_s: float,
        max_bypass: int,
        prefix_caching: bool,
        max_cells: int | None,
        aging_s: float,
        atomic: bool,
        picture_cells: int,
        limits: list[ShardLimits],
    ) -> None:
        config = SchedulerConfig(
            mode=mode,
            waiting_served_ratio=ratio,
            max_waiting_tokens=max_waiting,
            max_batch_size=None if self.keeps_all else max_batch_size,
            run_ahead_steps=run_ahead,
            run_ahead_s=run_ahead_s,
            max_bypass=max_bypass,
            target_itl_s=0.03,
            prefix_caching=self.keeps_all or prefix_caching,
            max_batch_total_tokens=None if self.keeps_all else max_cells,
            aging_s=aging_s,
            max_losses=10**6,
            max_fatal_losses=10**6,
        )
        self.simulation = Simulation(config)
        self.folder = tempfile.TemporaryDirectory()
        self.recording = Path(self.folder.name) / "recording"
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr("caravan_studio.recording.names._MANY_KEYS", self.many_keys)
        self.recorder = Recorder(self.recording)
        self.simulation.scheduler = recorded(self.simulation.scheduler, config, self.recorder)
        self.atomic, self.picture_cells = atomic, picture_cells
        self.limits = dict(zip(_NAMES, limits, strict=False))
        for name in self.limits:
            self._join(name)

    def _join(self, name: str) -> None:
        self.simulation.join(name, self.limits[name])
        self.simulation.shards[name].atomic = self.atomic

    def _prompt(self, tokens: list[int], kind: dict[str, Any]) -> dict[str, Any]:
        """Return the prompt, with pictures if its ``kind`` has them, and the other fields of ``kind``."""
        if "pictures" not in kind:
            return {"prompt": tuple(tokens), **kind}
        prompt, media = in_pictures(tokens, self.picture_cells, atomic=self.atomic)
        return {"prompt": prompt, "media": media, **{name: value for name, value in kind.items() if name != "pictures"}}

    @rule(
        prompt=_PROMPTS,
        new=st.integers(1, 30),
        eos=st.booleans(),
        priority=st.sampled_from([BULK_PRIORITY, -1, 0, 1]),
        tenant=st.sampled_from([Tenant(name="x"), Tenant(name="y", weight=2.0)]),
        session=st.sampled_from(["", "", "one", "two"]),
        copies=st.sampled_from([1, 1, 1, 3]),
        kind=st.sampled_from(
            [
                {},
                {"pictures": True},
                {"pictures": True, "namespace": "salt"},
                {"namespace": "salt"},
                {"thought": THOUGHT},
                {"adapter": "x"},
                {"adapter": "y"},
                {"prompt_logprobs": True},
                {"prompt_logprobs": True, "pictures": True},
            ]
        ),
        max_draft_tokens=st.sampled_from([0, 0, 2, 8]),
        lasts_s=_LASTING,
        keep_s=st.sampled_from([0.0, 0.0, 5.0, 1e5]),
    )
    def submit(
        self,
        prompt: list[int],
        new: int,
        eos: bool,
        priority: int,
        tenant: Tenant,
        session: str,
        copies: int,
        kind: dict[str, Any],
        max_draft_tokens: int,
        lasts_s: float,
        keep_s: float,
    ) -> None:
        for _ in range(copies):
            self.simulation.submit(
                max_new_tokens=new,
                ignore_eos=not eos,
                priority=priority,
                tenant=tenant,
                session=session,
                max_draft_tokens=max_draft_tokens,
                end_by_s=self.simulation.now + lasts_s,
                keep_s=keep_s,
                **self._prompt(prompt, kind),
            )

    @rule(
        prompt=_PROMPTS,
        new=st.integers(1, 20),
        eos=st.booleans(),
        priority=st.sampled_from([BULK_PRIORITY, -1, 0, 1]),
        width=st.integers(1, 4),
        penalty=st.sampled_from([0.0, 1.0, 2.0]),
        early=st.sampled_from(EarlyStopping),
        kind=st.sampled_from([{}, {"pictures": True}, {"namespace": "salt"}, {"adapter": "x"}]),
        lasts_s=_LASTING,
    )
    def submit_beams(
        self,
        prompt: list[int],
        new: int,
        eos: bool,
        priority: int,
        width: int,
        penalty: float,
        early: EarlyStopping,
        kind: dict[str, Any],
        lasts_s: float,
    ) -> None:
        ends = frozenset(range(0, 97, 7))
        search = BeamSearch(width=width, index=0, length_penalty=penalty, early_stopping=early, eos_token_ids=ends)
        fields: dict[str, Any] = {
            "ignore_eos": not eos,
            "priority": priority,
            "end_by_s": self.simulation.now + lasts_s,
        }
        self.simulation.submit_beams(max_new_tokens=new, search=search, **fields, **self._prompt(prompt, kind))

    @rule(
        token=st.integers(1, 6),
        length=st.sampled_from([16, 20, 37]),
        tails=st.lists(_TAILS, min_size=2, max_size=4),
        new=st.integers(1, 12),
        kind=st.sampled_from([{}, {"pictures": True}, {"adapter": "x"}, {"prompt_logprobs": True, "pictures": True}]),
        saved=st.sampled_from([True, True, False]),
    )
    def submit_again(
        self, token: int, length: int, tails: list[list[int]], new: int, kind: dict[str, Any], saved: bool
    ) -> None:
        """Submit requests that begin alike, and again when they have ended, and maybe when what they held is saved."""
        prompts = [self._prompt([*[token] * length, *tail], kind) for tail in tails]
        for prompt in prompts:
            self.simulation.submit(max_new_tokens=new, **prompt)
        self.rest() if saved else self.simulation.run()
        for prompt in prompts:
            self.simulation.submit(max_new_tokens=new, **prompt)

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data(), tail=st.lists(st.integers(1, 2), min_size=1, max_size=4), new=st.integers(1, 8))
    def fork(self, data: st.DataObject, tail: list[int], new: int) -> None:
        """Submit a request that begins with the prompt of another, which may still run, and its output so far."""
        one = self.simulation.requests[data.draw(st.sampled_from(sorted(self.simulation.requests)))]
        known = (*one.spec.prompt, *self.simulation.received[one.request_id])
        spec = one.spec
        self.simulation.submit((*known, *tail), new, namespace=spec.namespace, adapter=spec.adapter, media=spec.media)

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def end_thought(self, data: st.DataObject) -> None:
        self.simulation.end_thought(data.draw(st.sampled_from(sorted(self.simulation.requests))))

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.simulation.cancel(data.draw(st.sampled_from(sorted(self.simulation.requests))))

    @precondition(lambda self: self.simulation.shards)
    @rule(data=st.data(), steps=st.integers(1, 8))
    def advance(self, data: st.DataObject, steps: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.simulation.shards)))
        self.simulation.advance(name, steps)

    @precondition(lambda self: self.simulation.shards)
    @rule(data=st.data(), outcome=st.sampled_from([StepOutcome.NO_KV, StepOutcome.ABORTED]))
    def fail_step(self, data: st.DataObject, outcome: StepOutcome) -> None:
        name = data.draw(st.sampled_from(sorted(self.simulation.shards)))
        self.simulation.shards[name].fail_next_step = outcome

    @precondition(lambda self: self.simulation.shards)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        """Let the next Save, Load or SetLayout fail for some."""
        shard = self.simulation.shards[data.draw(st.sampled_from(sorted(self.simulation.shards)))]
        what = data.draw(
            st.sampled_from(["refuse_next_save", "break_next_load", "lose_next_moved", "refuse_next_layout"])
        )
        setattr(shard, what, True)

    @precondition(lambda self: self.simulation.shards)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.simulation.lose(data.draw(st.sampled_from(sorted(self.simulation.shards))))

    @precondition(lambda self: len(self.simulation.shards) < len(self.limits))
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.limits) - set(self.simulation.shards))))
        self._join(name)

    @precondition(lambda self: self.simulation.shards)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        self.simulation.drain(data.draw(st.sampled_from(sorted(self.simulation.shards))))

    @precondition(lambda self: self.simulation.transfers)
    @rule(data=st.data(), fails=st.booleans())
    def finish_transfer(self, data: st.DataObject, fails: bool) -> None:
        self.simulation.finish_transfer(data.draw(st.sampled_from(sorted(self.simulation.transfers))), fails=fails)

    @precondition(lambda self: self.simulation.encodings)
    @rule(data=st.data(), outcome=st.sampled_from([EncodeOutcome.DONE, EncodeOutcome.DONE, *EncodeOutcome]))
    def finish_encoding(self, data: st.DataObject, outcome: EncodeOutcome) -> None:
        busy = {one.shard for one in self.simulation.encodings.values()}
        self.simulation.finish_encoding(data.draw(st.sampled_from(sorted(busy))), outcome)

    @precondition(lambda self: self.simulation.shards)
    @rule(data=st.data())
    def forget_media(self, data: st.DataObject) -> None:
        self.simulation.shards[data.draw(st.sampled_from(sorted(self.simulation.shards)))].encoded.clear()

    @rule(names=st.sets(st.sampled_from(_NAMES)))
    def flush(self, names: set[str]) -> None:
        self.simulation.flush(*names)

    @precondition(lambda self: self.simulation.remembered())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.simulation.drop(data.draw(st.sampled_from(self.simulation.remembered())))

    @rule(prompt=_PROMPTS, kind=st.sampled_from(["", "", "salt"]))
    def pin(self, prompt: list[int], kind: str) -> None:
        keys = PrefixKeys(kind, lambda start, stop: prompt[start:stop])
        self.simulation.pin(keys.at(len(prompt)), length=len(prompt), tokens=tuple(prompt), namespace=kind)

    @precondition(lambda self: self.simulation.remembered())
    @rule(data=st.data())
    def pin_remembered(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.simulation.remembered()))
        found = [prefixes_of(state, key).prefixes for state in self.simulation.scheduler.shards.values()]
        tokens = [tokens_of(state, key) for state in self.simulation.scheduler.shards.values()]
        one = next(prefixes[0] for prefixes in found if prefixes)
        self.simulation.pin(key, length=one.tokens, tokens=next(filter(None, tokens), ()), adapter=one.adapter)

    @precondition(lambda self: any(self.simulation.scheduler.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(list(self.simulation.scheduler.pins)))
        self.simulation.handle(Unpinned(pin.key))

    @rule()
    def rest(self) -> None:
        """Let everything end, and time pass, in which shards save what they hold."""
        self.simulation.run()
        for _ in range(3):
            self.simulation.tick(0.5)
            self.simulation.run()

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def tick(self, seconds: float) -> None:
        self.simulation.tick(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        # Whatever fails here, nothing is left behind that would be reported in its place.
        with ExitStack() as left:
            left.enter_context(self.folder)
            left.callback(self.patches.undo)
            try:
                self._end_all()
            finally:
                self.recorder.close()
            found = differences(self.recording)
        assert not found, f"a recording decides otherwise when it is played again: {found}"

    def _end_all(self) -> None:
        for name, state in list(self.simulation.scheduler.shards.items()):
            if state.drain.has_begun:
                self.simulation.lose(name)
        for name in set(self.limits) - set(self.simulation.shards):
            self._join(name)
        self.simulation.settle()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=examples(200), stateful_step_count=60)


class SavingSchedulerMachine(SchedulerMachine):
    """Much returns from host memory."""

    shard_limits = _SAVING_LIMITS
    keeps_all = True
    many_keys = 4


TestSavingSchedulerMachine = SavingSchedulerMachine.TestCase
TestSavingSchedulerMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)


class CheckpointSchedulerMachine(SchedulerMachine):
    """Sequences cannot be cut back, and continue from where prompts paused."""

    shard_limits = _CHECKPOINT_LIMITS
    keeps_all = True

    @rule(
        messages=st.lists(st.sampled_from([16, 17, 20, 31]), min_size=1, max_size=4),
        tails=st.lists(st.integers(1, 20), min_size=1, max_size=3),
        new=st.integers(1, 6),
    )
    def converse(self, messages: list[int], tails: list[int], new: int) -> None:
        """Submit several questions behind the same messages, one after another, and the first one again."""
        history = tuple(token for length in messages for token in (*[1] * (length - 1), 2))
        for tail in (*tails, tails[0]):
            self.simulation.submit((*history, *[3] * tail), new)
            self.rest()


TestCheckpointSchedulerMachine = CheckpointSchedulerMachine.TestCase
TestCheckpointSchedulerMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)
