"""A scheduler and model shards. Events are handled one at a time, and every invariant is checked after each."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from caravan_proto.messages.commands import Decode, Evaluate, FilterBatch, Load, Prefill, Save, SetLayout
from caravan_proto.messages.constraint import Thought
from caravan_proto.messages.results import Loaded
from caravan_scheduler import invariants
from caravan_scheduler.actions import (
    Action,
    Deliver,
    Drafted,
    Drained,
    Encode,
    Fail,
    FailureReason,
    Faulted,
    Fetch,
    Flushed,
    Joins,
    Left,
    PinAnswered,
    Preempt,
    Resume,
    Start,
)
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import ANYONE, BeamSearch, GenerationSpec, Tenant
from caravan_scheduler.core.prefixes import PinRefusal, ShardPrefixes
from caravan_scheduler.core.prompt_media import PromptMedia
from caravan_scheduler.events import (
    Cancelled,
    Encoded,
    EncodeOutcome,
    Event,
    Fetched,
    FlushRequested,
    PinRequested,
    Replaced,
    ShardDraining,
    ShardJoined,
    ShardLimits,
    ShardLost,
    Submitted,
    Taken,
    ThoughtEndRequested,
    Tick,
    Unpinned,
)
from caravan_scheduler.pins import Pin
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.remembered import prefixes_of, tokens_of
from caravan_scheduler.shard.resident import Status
from caravan_testing.beam_oracle import beam_outputs
from caravan_testing.ledgers import LIMITS
from caravan_testing.model_outputs import expected_output, expected_prompt_logprobs, next_logprobs
from caravan_testing.model_runs import Run
from caravan_testing.model_shard import ModelShard
from caravan_testing.requests import request

if TYPE_CHECKING:
    from caravan_proto.messages.results import DraftCount
    from caravan_scheduler.core.tokens import PromptToken
    from caravan_scheduler.sequence import Request

A = TypeVar("A")


def expected_beam(spec: GenerationSpec) -> list[int]:
    """Return the output of one member of a beam search."""
    assert spec.beams is not None
    outputs = beam_outputs(lambda tokens: next_logprobs(list(tokens), spec.adapter), spec)
    return list(outputs[spec.beams.index].tokens)


def _kept_beside(state: ShardAccount, key: bytes) -> dict[bytes, tuple[int, tuple[int, ...] | None]]:
    """Return the length and the tokens of the prefixes that ``state`` keeps, but for one."""
    kept = (prefix for prefix in prefixes_of(state).prefixes if prefix.key != key)
    return {prefix.key: (prefix.tokens, tokens_of(state, prefix.key)) for prefix in kept}


class Simulation:
    """Drives a scheduler and collects what every request receives."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.shards: dict[str, ModelShard] = {}
        self.requests: dict[int, Request] = {}
        self.received: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, tuple[PromptToken, ...]] = {}
        self.drafts: dict[int, list[DraftCount]] = {}
        self.finished: set[int] = set()
        self.failed: dict[int, FailureReason] = {}
        self.cancelled: set[int] = set()
        self.flushed: dict[int, tuple[ShardPrefixes, ...]] = {}
        self.pin_answers: dict[int, PinRefusal | None] = {}
        self.actions: list[Action] = []
        self.transfers: dict[int, Fetch] = {}
        self.encodings: dict[int, Encode] = {}
        self.drained: list[str] = []
        self.now = 0.0
        self._ids = itertools.count(1)
        self._flush_ids = itertools.count(1)

    def handle(self, *events: Event) -> list[Action]:
        pinned = {name: set(state.runs.pinned) for name, state in self.scheduler.shards.items()}
        actions = self.scheduler.handle(events, self.now)
        if not any(isinstance(event, FlushRequested | Unpinned | Loaded | ShardJoined | ShardLost) for event in events):
            self._check_pinned(pinned)
        self.actions += actions
        for action in actions:
            self._execute(action)
        invariants.check(self.scheduler)
        return actions

    def _check_pinned(self, before: dict[str, set[bytes]]) -> None:
        """Check that no run that was pinned has made way for others, and that pins take no more than they may."""
        for name, state in self.scheduler.shards.items():
            assert all(key in state.runs for key in before[name]), "a pinned run has made way"
            assert sum(state.runs.pinned.values()) <= state.capacity.limits.memory_bytes // 2

    def pin(
        self, key: bytes, *, length: int, tokens: tuple[int, ...] = (), namespace: str | None = None, adapter: str = ""
    ) -> PinRefusal | None:
        """Pin a prefix. Return why it was refused."""
        pin_id = next(self._flush_ids)
        pin = Pin(key=key, length=length, tokens=tokens, tenant="", adapter=adapter, namespace=namespace)
        self.handle(PinRequested(pin_id, pin))
        return self.pin_answers.pop(pin_id)

    def _execute(self, action: Action) -> None:
        match action:
            case Prefill() | Decode() | Evaluate() | FilterBatch() | Save() | Load() | SetLayout():
                self.shards[action.shard].send(action)
            case Deliver():
                self._deliver(action)
            case Drafted():
                self._assert_open(action.request_id)
                self.drafts[action.request_id].append(action.count)
            case Fail():
                self._assert_open(action.request_id)
                self.failed[action.request_id] = action.reason
            case Flushed():
                self.flushed[action.flush_id] = action.evicted
            case Fetch():
                self.transfers[action.transfer_id] = action
            case Encode():
                assert action.shard in self.shards
                self.encodings[action.encode_id] = action
            case Drained():
                assert not self.scheduler.shards[action.shard].stays.residents
                assert not self.shards[action.shard].commands
                self.drained.append(action.shard)
            case PinAnswered():
                self.pin_answers[action.pin_id] = action.refusal
            case Faulted():
                self._go_on(action)
            case Start() | Resume() | Preempt():
                assert action.request_id in self.requests
            case Joins() | Left():
                pass

    def _go_on(self, fault: Faulted) -> None:
        """Raise the exception of a bug that the scheduler has survived."""
        raise fault.error

    def _deliver(self, action: Deliver) -> None:
        request_id = action.request_id
        self._assert_open(request_id)
        if action.prompt_logprobs:
            assert not self.received[request_id], "prompt logprobs after the first token"
            self.prompt_logprobs[request_id] = self.prompt_logprobs.get(request_id, ()) + action.prompt_logprobs
        for token in action.tokens:
            self._assert_open(request_id)
            self.received[request_id].append(token.token_id)
            if token.finish is not None:
                self.finished.add(request_id)

    def _assert_open(self, request_id: int) -> None:
        ended = self.finished | self.cancelled | self.failed.keys()
        assert request_id not in ended, f"request {request_id} has an action after its end"

    def join(
        self, name: str, limits: ShardLimits, *, survived: bool = False, runs: Mapping[bytes, Run] | None = None
    ) -> None:
        """Let a shard join that has saved ``runs`` before."""
        shard = self.shards[name] = ModelShard(name, limits)
        shard.runs.update(runs or {})
        listed = sorted((run.saved for run in shard.runs.values()), key=lambda saved: saved.start)
        self.handle(ShardJoined(name, limits, tuple(listed), survived))

    def lose(self, name: str) -> None:
        del self.shards[name]
        self.drained = [drained for drained in self.drained if drained != name]
        self.encodings = {key: one for key, one in self.encodings.items() if one.shard != name}
        self.handle(ShardLost(name))
        for fetch in list(self.transfers.values()):
            if name in (fetch.source, fetch.target):
                self.finish_transfer(fetch.transfer_id)

    def drain(self, name: str) -> None:
        self.handle(ShardDraining(name))

    def finish_transfer(self, transfer_id: int, *, fails: bool = False) -> None:
        """Copy the runs of a transfer from shard to shard, in order until one fails, and report it."""
        fetch = self.transfers.pop(transfer_id)
        source, target = self.shards.get(fetch.source), self.shards.get(fetch.target)
        fetched: list[bool] = []
        for key in fetch.keys:
            is_possible = source is not None and target is not None and not fails and all(fetched)
            fetched.append(is_possible and target.adopt(source.runs.get(key)))  # type: ignore[union-attr]
        self.handle(Fetched(transfer_id=transfer_id, fetched=tuple(fetched), seconds=0.02))

    def finish_encoding(self, shard: str, outcome: EncodeOutcome = EncodeOutcome.DONE) -> None:
        """Encode what ``shard`` was asked for first."""
        encode = next(one for one in self.encodings.values() if one.shard == shard)
        del self.encodings[encode.encode_id]
        if outcome is EncodeOutcome.DONE:
            self.shards[shard].encode(encode.media.id)
        self.handle(Encoded(encode_id=encode.encode_id, outcome=outcome, seconds=0.1))

    def submit(
        self,
        prompt: tuple[int, ...],
        max_new_tokens: int,
        *,
        ignore_eos: bool = False,
        priority: int = 0,
        tenant: Tenant = ANYONE,
        session: str = "",
        namespace: str = "",
        adapter: str = "",
        prompt_logprobs: bool = False,
        media: PromptMedia | None = None,
        max_draft_tokens: int = 0,
        end_by_s: float = math.inf,
        thought: Thought | None = None,
        keep_s: float = 0.0,
    ) -> int:
        request_id = next(self._ids)
        made = request(
            request_id,
            prompt,
            max_new_tokens,
            ignore_eos=ignore_eos,
            priority=priority,
            tenant=tenant,
            session=session,
            namespace=namespace,
            adapter=adapter,
            prompt_logprobs=prompt_logprobs,
            media=media,
            arrived_s=self.now,
            max_draft_tokens=max_draft_tokens,
            end_by_s=end_by_s,
            keep_s=keep_s,
        )
        made = replace(made, spec=replace(made.spec, thought=thought))
        self.requests[request_id] = made
        self.received[request_id] = []
        self.drafts[request_id] = []
        self.handle(Submitted(made))
        return request_id

    def submit_beams(
        self, prompt: tuple[int, ...], max_new_tokens: int, search: BeamSearch, **fields: Any
    ) -> list[int]:
        """Submit the members of a beam search at once."""
        ids = [next(self._ids) for _ in range(search.width)]
        for index, request_id in enumerate(ids):
            made = request(request_id, prompt, max_new_tokens, arrived_s=self.now, **fields)
            made = replace(made, spec=replace(made.spec, beams=replace(search, index=index)))
            self.requests[request_id] = made
            self.received[request_id] = []
            self.drafts[request_id] = []
        self.handle(*(Submitted(self.requests[request_id]) for request_id in ids))
        return ids

    def _with_its_search(self, request_id: int) -> list[int]:
        """Return the request, or all members of its beam search."""
        beams = self.requests[request_id].spec.beams
        first = request_id if beams is None else request_id - beams.index
        return list(range(first, first + (1 if beams is None else beams.width)))

    def end_thought(self, request_id: int) -> None:
        self.handle(ThoughtEndRequested(request_id))

    def cancel(self, request_id: int) -> None:
        for member in self._with_its_search(request_id):
            if member not in self.finished and member not in self.failed:
                self.cancelled.add(member)
        self.handle(Cancelled(request_id))

    def flush(self, *shards: str) -> tuple[ShardPrefixes, ...]:
        """Flush ``shards``. Check that all they held of ended sequences is evicted and returned."""
        states = [state for name, state in self.scheduler.shards.items() if name in shards]
        parked = [list(state.stays.parked.values()) for state in states]
        saved = [set(state.runs.listed) for state in states]
        pinned = {state.name: {pin.key for pin in state.runs.pins if state.runs.holding(pin.key)} for state in states}
        cells = [state.cells.held - state.cells.live for state in states]
        flush_id = next(self._flush_ids)
        self.handle(FlushRequested(flush_id, frozenset(shards)))
        evicted = self.flushed.pop(flush_id)
        assert [one.shard for one in evicted] == [state.name for state in states]
        for one, state, residents, keys in zip(evicted, states, parked, saved, strict=True):
            expected = keys | {resident.prefix_key for resident in residents} | pinned[state.name]
            assert len(one.prefixes) == len(expected)
            assert {prefix.key for prefix in one.prefixes} == expected
            assert all(resident.status is not Status.PARKED for resident in residents)
            assert not state.runs.keys
        assert [one.cells for one in evicted] == cells
        for one in evicted:
            assert sum(prefix.cells for prefix in one.prefixes) <= one.cells
        return evicted

    def remembered(self) -> list[bytes]:
        """Return the keys of the prefixes that shards keep of ended sequences."""
        found = (prefixes_of(state).prefixes for state in self.scheduler.shards.values())
        return sorted({prefix.key for prefixes in found for prefix in prefixes})

    def drop(self, key: bytes) -> tuple[ShardPrefixes, ...]:
        """Drop one prefix. Check that nobody finds it any more, and that everything else is there as before."""
        before = {state.name: _kept_beside(state, key) for state in self.scheduler.shards.values()}
        flush_id = next(self._flush_ids)
        self.handle(FlushRequested(flush_id, frozenset(self.shards), key))
        for state in self.scheduler.shards.values():
            assert not prefixes_of(state, key).prefixes
            assert _kept_beside(state, key) == before[state.name]
        return self.flushed.pop(flush_id)

    def advance(self, name: str, steps: int = 1) -> None:
        """Let one shard run ``steps``, and report each to the scheduler."""
        for _ in range(steps):
            self.now += 0.01
            for event in self.shards[name].advance():
                self.handle(event)

    def run(self, max_steps: int = 10_000) -> None:
        """Run steps of all shards until no command and no transfer is left. Shards that have drained end."""
        for _ in range(max_steps):
            busy = [name for name, shard in self.shards.items() if shard.commands]
            if not (busy or self.transfers or self.encodings or self.drained):
                return
            for name in busy:
                self.advance(name)
            for transfer_id in list(self.transfers):
                self.finish_transfer(transfer_id)
            for name in {one.shard for one in self.encodings.values()}:
                self.finish_encoding(name)
            for name in list(self.drained):
                self.lose(name)
        raise AssertionError(f"not at rest after {max_steps} steps")

    def replace_scheduler(self) -> None:
        """Lose all shards, and let another scheduler take the requests that are left."""
        for name in list(self.shards):
            self.lose(name)
        (left,) = (action for action in self.handle(Replaced()) if isinstance(action, Left))
        assert not self.scheduler.sequences
        assert not list(self.scheduler.waiting)
        self.scheduler = Scheduler(self.config)
        self.handle(Taken(left.sequences))

    def sent(self, *kinds: type[A], since: int = 0) -> list[A]:
        """Return the actions of these kinds, without the first ``since`` of all."""
        return [action for action in self.actions[since:] if isinstance(action, kinds)]

    def complete(self, prompt: tuple[int, ...], max_new_tokens: int, **fields: Any) -> int:
        """Submit a request, and run all steps."""
        request_id = self.submit(prompt, max_new_tokens, **fields)
        self.run()
        return request_id

    def settle(self) -> None:
        """Run all steps, and check what is left."""
        self.run()
        self.check_at_rest()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.handle(Tick())

    def check_at_rest(self) -> None:
        """Check that every request ended once, with the right tokens, and that nothing but parked sequences is held."""
        for request_id, made in self.requests.items():
            expected = expected_beam(made.spec) if made.spec.beams is not None else expected_output(made.spec)
            received = self.received[request_id]
            if request_id in self.finished and made.spec.beams is not None and made.end_by_s < math.inf:
                assert received, "a search that is late delivers what it has"
            elif request_id in self.finished:
                assert received == expected
                logprobs = expected_prompt_logprobs(made.spec) if made.spec.prompt_logprobs else ()
                assert self.prompt_logprobs.get(request_id, ()) == logprobs
            else:
                assert request_id in self.cancelled or request_id in self.failed, f"request {request_id} was forgotten"
                assert received == expected[: len(received)] or made.spec.beams is not None
        for name, shard in self.shards.items():
            state = self.scheduler.shards[name]
            assert set(shard.held) == set(state.stays.parked), "what is held at rest is parked"
            assert shard.used_cells == state.cells.held
            assert state.cells.live == 0
            assert set(shard.runs) >= set(state.runs.keys), "the router counts on runs that are gone"
            assert not shard.commands


def simulation(*shards: str, limits: ShardLimits = LIMITS, **config: object) -> Simulation:
    """Return a simulation with ``shards``, by default "a". ``config``: fields of `SchedulerConfig`."""
    result = Simulation(SchedulerConfig(**config))  # type: ignore[arg-type]
    for name in shards or ("a",):
        result.join(name, limits)
    return result
