"""Passes events to the scheduler of one model and executes its actions. The one owner of the model's requests."""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection
from typing import assert_never

from caravan_router.core.engine import ModelFacts
from caravan_router.core.errors import (
    DeadlineError,
    EngineError,
    GenerationError,
    NoShardError,
    QueueTimeoutError,
)
from caravan_router.core.generation import GenerationSpec
from caravan_router.core.prefixes import ShardPrefixes
from caravan_router.core.trace import NO_TRACE, GenerationTrace
from caravan_router.engine.observer import EngineObserver, ShardUse
from caravan_router.engine.queries import ShardQueries
from caravan_router.engine.replicas import Replicas
from caravan_router.engine.streams import RequestStream
from caravan_router.scheduling.actions import (
    Action,
    Decode,
    Deliver,
    Drafted,
    Drained,
    Evaluate,
    Fail,
    FailureReason,
    Fetch,
    FilterBatch,
    Flushed,
    Load,
    Preempt,
    Prefill,
    Resume,
    Save,
    SetLayout,
    Start,
)
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import Cancelled, Event, FlushRequested, ShardDraining, Submitted, Tick
from caravan_router.scheduling.scheduler import Scheduler
from caravan_router.scheduling.sequence import Request
from caravan_router.scheduling.shard.saved_runs import Tier

_FAILURES: dict[FailureReason, Callable[[], EngineError]] = {
    FailureReason.NO_SHARD: NoShardError,
    FailureReason.NO_PROGRESS: lambda: GenerationError("its shard was lost several times before the next token"),
    FailureReason.DOES_NOT_FIT: lambda: GenerationError("no shard has a cache large enough for it"),
    FailureReason.QUEUE_TIMEOUT: lambda: QueueTimeoutError("it waited too long for its turn"),
    FailureReason.DEADLINE: lambda: DeadlineError("it did not end within its timeout"),
}


class Batcher:
    """The engine of one model. Nothing moves unless ``run`` is running; everything happens on its event loop.

    Events that arrive in one turn of the loop are handled together, so requests of one instant are planned together.
    """

    def __init__(self, facts: ModelFacts, config: SchedulerConfig, observer: EngineObserver) -> None:
        """``facts``: those of the model's first shard, which is still to be added to ``replicas``."""
        self.scheduler = Scheduler(config)
        self.observer = observer
        self.replicas = Replicas(facts)
        self.queries = ShardQueries(self.replicas.links, self._sequences_on, config.no_shard_grace_s)
        self._queue_timeout_s = config.queue_timeout_s
        self._streams: dict[int, RequestStream] = {}
        self._request_ids = itertools.count(1)
        self._flushes: dict[int, asyncio.Future[tuple[ShardPrefixes, ...]]] = {}
        self._flush_ids = itertools.count(1)
        self._events: list[Event] = []
        self._posted = asyncio.Event()
        # Set once the first shard has joined.
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled. Raises the exception of a bug, such as a violated invariant."""
        while True:
            await self._posted.wait()
            self._posted.clear()
            events, self._events = self._events, []
            for action in self.scheduler.handle(events, time.monotonic()):
                self._execute(action)
            if self.scheduler.shards:
                self.ready.set()

    @property
    def is_settled(self) -> bool:
        """Whether no request is left, and the shards hold nothing of the closed streams."""
        shards = self.scheduler.shards.values()
        return not (self._events or self.scheduler.sequences or any(shard.in_flight for shard in shards))

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._streams)

    def drain(self) -> None:
        """Let every shard save what it keeps of ended sequences, and give it back then."""
        for shard in self.scheduler.shards:
            self.post(ShardDraining(shard))

    def tick(self) -> None:
        """Tell the scheduler the time, and the observer what is held and waits. Call it every fraction of a second."""
        self.post(Tick())
        waiting, now = self.scheduler.waiting, time.monotonic()
        self.observer.queue(
            requests=len(waiting),
            swapped=sum(bool(sequence.saved_on) for sequence in waiting),
            oldest_s=max(
                (now - sequence.request.arrived_s for sequence in waiting if not sequence.started), default=0.0
            ),
        )
        for name, shard in self.scheduler.shards.items():
            link = self.replicas.links.get(name)
            if link is None or link.client is None:
                continue  # It is lost, and the scheduler does not know yet.
            self.observer.shard_use(
                ShardUse(
                    shard=name,
                    used_cells=shard.live_cells,
                    cached_cells=shard.held_cells - shard.live_cells,
                    total_cells=shard.capacity,
                    memory_bytes=shard.runs.used_bytes[Tier.MEMORY],
                    disk_bytes=shard.runs.used_bytes[Tier.DISK],
                    sequences=len(shard.residents),
                )
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
                if action.joins is not None:
                    self.observer.joined(action.joins)
                self.replicas.links[action.shard].send(action)
            case Decode() | Evaluate() | FilterBatch() | Save() | Load() | SetLayout():
                self.replicas.links[action.shard].send(action)
            case Fetch():
                self.replicas.links[action.target].fetch(action, self.replicas.links[action.source].epoch)
            case Drained():
                self.replicas.links[action.shard].give_back()
            case Start():
                if (stream := self._streams.get(action.request_id)) is not None:
                    stream.start(action.shard, action.cached_tokens)
                self.observer.started(action.prompt_tokens, action.cached_tokens)
            case Resume():
                if (stream := self._streams.get(action.request_id)) is not None:
                    stream.trace.resumed(action.shard, action.computed_again)
                self.observer.resumed(action.computed_again)
            case Preempt():
                if (stream := self._streams.get(action.request_id)) is not None:
                    stream.trace.preempted(action.how.value)
                self.observer.preempted(action.how)
            case Fail():
                if (stream := self._streams.pop(action.request_id, None)) is not None:
                    stream.fail(_FAILURES[action.reason]())
            case Flushed():
                # It is gone if its caller gave up waiting.
                if (waiter := self._flushes.get(action.flush_id)) is not None and not waiter.done():
                    waiter.set_result(action.evicted)
            case _:
                assert_never(action)

    @property
    def model(self) -> ModelFacts:
        """The model, with the limits that hold on all of its shards."""
        return self.replicas.facts

    @property
    def healthy(self) -> bool:
        """Whether at least one shard is leased and makes progress."""
        return bool(self.scheduler.shards)

    def submit(self, spec: GenerationSpec, trace: GenerationTrace = NO_TRACE) -> RequestStream:
        """Queue a generation. It starts when a shard can take it."""
        request_id = next(self._request_ids)

        def cancel() -> None:
            self._streams.pop(request_id, None)
            self.post(Cancelled(request_id))

        stream = RequestStream(cancel, lambda: self.scheduler.state_of(request_id), trace)
        self._streams[request_id] = stream
        trace.queued()
        now = time.monotonic()
        request = Request(
            request_id=request_id,
            spec=spec,
            arrived_s=now,
            start_by_s=now + self._queue_timeout_s,
            end_by_s=now + spec.timeout_s,
        )
        self.post(Submitted(request))
        return stream

    def cached_prefixes(self) -> list[ShardPrefixes]:
        """Return what each leased shard keeps of ended sequences."""
        return [shard.prefixes for shard in self.scheduler.shards.values()]

    async def flush_prefixes(self, shards: Collection[str]) -> tuple[ShardPrefixes, ...]:
        """Evict all that ``shards`` keep of ended sequences, and return it. Shards that are not leased are left out."""
        flush_id = next(self._flush_ids)
        waiter: asyncio.Future[tuple[ShardPrefixes, ...]] = asyncio.get_running_loop().create_future()
        self._flushes[flush_id] = waiter
        self.post(FlushRequested(flush_id, frozenset(shards)))
        try:
            return await waiter
        finally:
            del self._flushes[flush_id]

    def is_free(self, address: str) -> bool:
        """Whether the shard at ``address`` is not leased."""
        return address not in self.scheduler.shards

    def _sequences_on(self, address: str) -> int:
        shard = self.scheduler.shards.get(address)
        return 0 if shard is None else len(shard.residents)
