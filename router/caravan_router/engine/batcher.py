"""Passes events to the scheduler of one model and executes its actions. The one owner of the model's requests."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import assert_never

from caravan_proto.messages.adapters import adapter_name, is_loaded_key
from caravan_proto.messages.commands import Decode, Evaluate, FilterBatch, Load, Prefill, Save, SetLayout
from caravan_router.engine.absence import Absence
from caravan_router.engine.adapters import ModelAdapters
from caravan_router.engine.followers import Followers
from caravan_router.engine.model_prefixes import ModelPrefixes
from caravan_router.engine.observer import EngineObserver, QueueUse, ShardUse
from caravan_router.engine.queries import ShardQueries
from caravan_router.engine.replacement import can_continue, tokens_mean_the_same
from caravan_router.engine.replicas import Replicas
from caravan_router.engine.streams import RequestInBatch, RequestStream
from caravan_router.engine.wall import FaultLog
from caravan_scheduler import recovery
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
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.errors import (
    AdapterUnloadedError,
    DeadlineError,
    EngineError,
    FaultError,
    GenerationError,
    ModelReplacedError,
    QueueTimeoutError,
)
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.prefixes import PinRefusal, PrefixReport
from caravan_scheduler.core.trace import NO_TRACE, GenerationTrace
from caravan_scheduler.events import (
    ActionFailed,
    Cancelled,
    Event,
    GraceChanged,
    Replaced,
    ShardDraining,
    Submitted,
    Taken,
    ThoughtEndRequested,
    Tick,
    ToolsCalled,
)
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Request, Sequence
from caravan_scheduler.shard.saved_runs import Tier


class Batcher:
    """The engine of one model. Nothing moves unless ``run`` is running; everything happens on its event loop.

    Events that arrive in one turn of the loop are handled together, so requests of one instant are planned together.

    An engine that `replace_by` ends for good passes its requests on: its callers may still have it.
    """

    def __init__(
        self,
        facts: ModelFacts,
        config: SchedulerConfig,
        observer: EngineObserver,
        request_ids: Iterator[int],
        former: "Batcher | None" = None,
    ) -> None:
        """``facts``: those of the model's first shard, which is still to be added to ``replicas``.

        ``request_ids``: shared with engines that may replace this one. ``former``: the engine that had the name before.
        """
        self.scheduler: Scheduler = Scheduler(config, None if former is None else former.scheduler)
        self.observer = observer
        self.replicas = Replicas(facts)
        absence = Absence(config.no_shard_grace_s)
        self.queries = ShardQueries(
            self.replicas, self._sequences_on, absence, config.aging_s, self.scheduler.wanted.texts
        )
        self._queue_timeout_s = config.queue_timeout_s
        self._streams: dict[int, RequestStream] = {}
        self._request_ids = request_ids
        self._faults = FaultLog(facts.name)
        # The engine that has its requests now.
        self._successor: Batcher | None = None
        self._events: list[Event] = []
        self._posted = asyncio.Event()
        # When the last generation was asked for, on time.monotonic.
        self.used_s = 0.0
        self.adapters = ModelAdapters(
            self.replicas,
            lambda: _adapters_of(self._events, self.scheduler.sequences.values()),
            lambda key: _end_those_with(key, self),
        )
        self.prefixes = ModelPrefixes(facts, self.scheduler, self.post)
        # They are told of each call of the scheduler.
        self.followers = Followers()
        # Set once the first shard has joined.
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled. Raises the bug that every call of the scheduler meets, if there is one."""
        with closing(self.adapters):
            while True:
                await self._posted.wait()
                self._posted.clear()
                events, self._events = self._events, []
                now = time.monotonic()
                if self.followers:
                    self.followers.hear(events)
                actions = recovery.handle(self.scheduler, events, now)
                if self.followers:
                    self.followers.note(events, actions, now)
                for action in actions:
                    try:
                        self._execute(action)
                    except Exception as error:  # noqa: BLE001  whatever a bug raises
                        self._give_up(action, error)
                if self.scheduler.shards:
                    self.ready.set()
                self._faults.check(actions)

    def _give_up(self, action: Action, error: Exception) -> None:
        """End the request of which an action was not carried out; let all shards be lost if it was one of theirs."""
        self._faults.log(error, action=type(action).__name__)
        match action:
            case Deliver() | Drafted() | Start() | Resume() | Preempt() | Fail():
                if (stream := self._streams.pop(action.request_id, None)) is not None:
                    stream.fail(self._error(FailureReason.FAULT))
                self.post(Cancelled(action.request_id))
            case _:
                self.post(ActionFailed())

    @property
    def is_settled(self) -> bool:
        """Whether no request is left, and the shards hold nothing of the closed streams."""
        shards = self.scheduler.shards.values()
        return not (self._events or self.scheduler.sequences or any(shard.commands.in_flight for shard in shards))

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._streams) or self.queries.waiting > 0

    def set_absence(self, absence: Absence) -> None:
        """Change how long requests wait while no shard is up, and what they fail for."""
        self.queries.absence = absence
        self.post(GraceChanged(absence.grace_s))

    def drain(self) -> None:
        """Let every shard save what it keeps of ended sequences, and give it back then."""
        for shard in self.scheduler.shards:
            self.post(ShardDraining(shard))

    def tick(self) -> None:
        """Tell the scheduler the time, and the observer what is held. Call it every fraction of a second."""
        self.post(Tick())
        self.adapters.free_unused()
        for name, shard in self.scheduler.shards.items():
            link = self.replicas.links.get(name)
            if link is None or link.client is None:
                continue  # It is lost, and the scheduler does not know yet.
            self.observer.shard_use(
                ShardUse(
                    shard=name,
                    used_cells=shard.cells.live,
                    cached_cells=shard.cells.held - shard.cells.live,
                    total_cells=shard.capacity.cells,
                    memory_bytes=shard.runs.used_bytes[Tier.MEMORY],
                    disk_bytes=shard.runs.used_bytes[Tier.DISK],
                    pinned_bytes=sum(shard.runs.pinned.values()),
                    sequences=len(shard.stays.residents),
                    adapters=frozenset(map(adapter_name, shard.stays.adapters)),
                )
            )

    @property
    def queue(self) -> QueueUse:
        """What waits, and how many shards it takes to serve that and what comes."""
        waiting, now = self.scheduler.waiting, time.monotonic()
        return QueueUse(
            requests=len(waiting),
            swapped=sum(bool(sequence.saved_on) for sequence in waiting),
            oldest_s=max(
                (now - sequence.request.arrived_s for sequence in waiting if not sequence.started), default=0.0
            ),
            adapters=frozenset(adapter_name(sequence.spec.adapter) for sequence in waiting)
            if self.model.adapters
            else frozenset(),
            max_adapters=len(self.model.adapters),
            wanted_shards=self.scheduler.wanted.number(self.scheduler.state, now),
        )

    def post(self, event: Event) -> None:
        """Hand ``event`` to the scheduler, after those that were posted before."""
        self._events.append(event)
        self._posted.set()

    def _execute(self, action: Action) -> None:
        match action:
            case Deliver():  # first, since most actions are Delivers
                # The stream is gone if it was closed in the same turn of the loop.
                stream = self._streams.get(action.request_id)
                if stream is not None and stream.deliver(action.prompt_logprobs, action.tokens):
                    del self._streams[action.request_id]
            case Drafted():
                if (stream := self._streams.get(action.request_id)) is not None:
                    stream.note_drafts(action.count)
            case Prefill():
                if started := sum(chunk.setup is not None for chunk in action.chunks):
                    self.observer.admitted(started)
                self.replicas.links[action.shard].send(action)
            case Decode() | Evaluate() | FilterBatch() | Save() | Load() | SetLayout():
                self.replicas.links[action.shard].send(action)
            case Joins():
                self.observer.joined(action.reason)
            case Fetch():
                self.replicas.links[action.target].run_beside(action, self.replicas.links[action.source].epoch)
            case Encode():
                self.replicas.links[action.shard].run_beside(action)
            case Drained():
                self.replicas.links[action.shard].give_back()
            case Start():
                if (stream := self._streams.get(action.request_id)) is not None:
                    stream.start(action, self.replicas.numerics(action.shard))
                self.observer.started(action)
            case Resume():
                if (stream := self._streams.get(action.request_id)) is not None:
                    stream.resume(action.shard, action.computed_again, self.replicas.numerics(action.shard))
                self.observer.resumed(action.computed_again)
            case Preempt():
                if (stream := self._streams.get(action.request_id)) is not None:
                    stream.trace.preempted(action.how.value)
                self.observer.preempted(action.how)
            case Fail():
                if (stream := self._streams.pop(action.request_id, None)) is not None:
                    stream.fail(self._error(action.reason))
            case Flushed() | PinAnswered():
                self.prefixes.note(action)
            case Left():
                self._pass_on(action.sequences)
            case Faulted():
                self._faults.log(action.error, requests=list(action.request_ids), rebuilt=action.is_rebuilt)
                self.observer.faulted(rebuilt=action.is_rebuilt)
                if action.is_rebuilt:
                    # The shards join again, and a request that the scheduler has lost ends.
                    for link in self.replicas.links.values():
                        if link.client is not None:
                            link.give_back()
                    for request_id in self._streams.keys() - self.scheduler.sequences.keys():
                        self._streams.pop(request_id).fail(self._error(FailureReason.FAULT))
            case _:
                assert_never(action)

    def _error(self, reason: FailureReason) -> EngineError:
        match reason:
            case FailureReason.NO_SHARD:
                return self.queries.absence.error(self.model.name)
            case FailureReason.NO_PROGRESS:
                return GenerationError("its shard was lost several times before the next token")
            case FailureReason.DOES_NOT_FIT:
                return GenerationError("no shard has a cache large enough for the request")
            case FailureReason.MEDIA:
                return GenerationError("an image or audio of the request could not be encoded")
            case FailureReason.QUEUE_TIMEOUT:
                return QueueTimeoutError("the request waited too long for its turn")
            case FailureReason.DEADLINE:
                return DeadlineError("the request did not end within its timeout")
            case FailureReason.NO_LOGITS:
                return GenerationError("the model computed no finite logits for this request")
            case FailureReason.FAULT:
                return FaultError("the request has met a bug of the router")
            case _:
                assert_never(reason)

    @property
    def model(self) -> ModelFacts:
        """The model, with the limits that hold on all of its shards."""
        return self.replicas.facts

    @property
    def room(self) -> int:
        """How many sequences its shards can have; those that drain take none. One that only embeds counts as 1."""
        shards = self.scheduler.shards.values()
        return sum(max(1, shard.capacity.limits.max_sequences) for shard in shards if not shard.drain.has_begun)

    @property
    def healthy(self) -> bool:
        """Whether at least one shard is leased and makes progress."""
        return bool(self.scheduler.shards)

    def submit(self, spec: GenerationSpec, trace: GenerationTrace = NO_TRACE) -> RequestStream:
        """Queue a generation. It starts when a shard can take it."""
        if self._successor is not None and self._passes_on(spec):
            return self._successor.submit(spec, trace)
        request_id = next(self._request_ids)
        asked = RequestInBatch(
            lambda: self._cancel(request_id),
            lambda: self._owner_of(request_id).post(ThoughtEndRequested(request_id)),
            lambda: self._owner_of(request_id).post(ToolsCalled(request_id)),
            lambda: self._owner_of(request_id).scheduler.standing_of(request_id),
        )
        stream = RequestStream(asked, trace)
        if self._successor is not None:
            stream.fail(ModelReplacedError(self.model.name))
            return stream
        if is_loaded_key(spec.adapter) and not self.adapters.accepts(spec.adapter):
            stream.fail(AdapterUnloadedError(adapter_name(spec.adapter)))
            return stream
        self._streams[request_id] = stream
        trace.queued()
        now = self.used_s = time.monotonic()
        request = Request(
            request_id=request_id,
            spec=spec,
            arrived_s=now,
            start_by_s=now + min(self._queue_timeout_s, spec.queue_timeout_s),
            end_by_s=now + spec.timeout_s,
        )
        self.post(Submitted(request))
        return stream

    async def pin_prompt(self, spec: GenerationSpec) -> PrefixReport | PinRefusal:
        """Let the prompt of ``spec`` stay: compute it where that is needed. Return it, or why not. Raises EngineError.

        ``spec`` generates one token, which is thrown away.
        """
        if self._successor is not None:
            if not self._passes_on(spec):
                raise ModelReplacedError(self.model.name)
            return await self._successor.pin_prompt(spec)
        return await self.prefixes.pin_computed(spec, lambda: self._compute(spec))

    async def _compute(self, spec: GenerationSpec) -> None:
        stream = self.submit(spec)
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()

    def replace_by(self, successor: "Batcher") -> None:
        """Pass the requests that wait, and those to come, on to ``successor``; no shard may be left here.

        Those whose tokens have another meaning there, or that it cannot serve, fail with ModelReplacedError.
        """
        self._successor = successor
        if tokens_mean_the_same(self.model, successor.model):
            self.queries.follow(successor.queries)
        else:
            self.queries.end(ModelReplacedError(self.model.name))
        self.post(Replaced())

    def _passes_on(self, spec: GenerationSpec) -> bool:
        assert self._successor is not None
        model = self._successor.model
        return tokens_mean_the_same(self.model, model) and can_continue(spec, model)

    def _pass_on(self, sequences: tuple[Sequence, ...]) -> None:
        assert self._successor is not None, "requests leave, and no router takes them"
        taken = tuple(sequence for sequence in sequences if self._passes_on(sequence.spec))
        self._successor.post(Taken(taken))
        for sequence in taken:
            stream = self._streams.pop(sequence.request_id, None)
            if stream is None:  # it was closed meanwhile
                self._successor.post(Cancelled(sequence.request_id))
            else:
                self._successor._streams[sequence.request_id] = stream
        for sequence in sequences:
            if (stream := self._streams.pop(sequence.request_id, None)) is not None:
                stream.fail(ModelReplacedError(self.model.name))

    def _cancel(self, request_id: int) -> None:
        if self._streams.pop(request_id, None) is None and self._successor is not None:
            self._successor._cancel(request_id)
        else:
            self.post(Cancelled(request_id))

    def _owner_of(self, request_id: int) -> "Batcher":
        owner = self
        while request_id not in owner._streams and owner._successor is not None:
            owner = owner._successor
        return owner

    def is_free(self, address: str) -> bool:
        """Whether the shard at ``address`` is not leased."""
        return address not in self.scheduler.shards

    def _sequences_on(self, address: str) -> int:
        shard = self.scheduler.shards.get(address)
        return 0 if shard is None else len(shard.stays.residents)


def _adapters_of(events: Iterable[Event], sequences: Iterable[Sequence]) -> set[str]:
    """Return the adapters of requests, those included that the scheduler has yet to hear of."""
    queued = {event.request.spec.adapter for event in events if isinstance(event, Submitted)}
    return queued | {sequence.spec.adapter for sequence in sequences}


def _end_those_with(key: str, batcher: Batcher) -> None:
    """End the requests with an adapter that not every shard has any more."""
    for request_id, sequence in batcher.scheduler.sequences.items():
        if sequence.spec.adapter == key and (stream := batcher._streams.pop(request_id, None)) is not None:
            stream.fail(AdapterUnloadedError(adapter_name(key)))
            batcher.post(Cancelled(request_id))
