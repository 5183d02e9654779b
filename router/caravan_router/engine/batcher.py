"""Passes events to the scheduler and executes its actions. The one owner of requests and shard links."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
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
from caravan_router.core.shards import ShardReport, ShardRoom
from caravan_router.engine.discovery import ShardSource
from caravan_router.engine.link import LinkConfig, ShardLink
from caravan_router.engine.link_pool import LinkPool
from caravan_router.engine.observer import EngineObserver, ShardUse
from caravan_router.engine.queries import ShardQueries
from caravan_router.engine.streams import RequestStream
from caravan_router.scheduling.actions import (
    Action,
    Decode,
    Deliver,
    Drained,
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
from caravan_router.scheduling.events import Cancelled, Event, FlushRequested, Submitted, Tick
from caravan_router.scheduling.scheduler import Scheduler
from caravan_router.scheduling.sequence import Request
from caravan_router.scheduling.shard.saved_runs import Tier

# The scheduler's deadlines are in seconds, so a coarse clock is enough when nothing else happens.
_TICK_S = 0.5
_SETTLE_POLL_S = 0.01

_FAILURES: dict[FailureReason, Callable[[], EngineError]] = {
    FailureReason.NO_SHARD: NoShardError,
    FailureReason.NO_PROGRESS: lambda: GenerationError("its shard was lost several times before the next token"),
    FailureReason.DOES_NOT_FIT: lambda: GenerationError("no shard has a cache large enough for it"),
    FailureReason.QUEUE_TIMEOUT: lambda: QueueTimeoutError("it waited too long for its turn"),
    FailureReason.DEADLINE: lambda: DeadlineError("it did not end within its timeout"),
}


class Batcher:
    """The engine. Nothing moves unless ``run`` is running; everything happens on its event loop.

    Events that arrive in one turn of the loop are handled together, so requests of one instant are planned together.
    """

    def __init__(
        self,
        sources: Iterable[ShardSource],
        scheduler_config: SchedulerConfig,
        link_config: LinkConfig,
        observer: EngineObserver,
    ) -> None:
        self.scheduler = Scheduler(scheduler_config)
        self._queue_timeout_s = scheduler_config.queue_timeout_s
        self._no_shard_grace_s = scheduler_config.no_shard_grace_s
        self._observer = observer
        self._pool = LinkPool(sources, link_config, post=self._post, is_free=self._is_free, observer=observer)
        self.queries = ShardQueries(self._pool.links, self._sequences_on, scheduler_config.no_shard_grace_s)
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
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pool.run())
            tasks.create_task(self._tick())
            while True:
                await self._posted.wait()
                self._posted.clear()
                events, self._events = self._events, []
                for action in self.scheduler.handle(events, time.monotonic()):
                    self._execute(action)
                if self.scheduler.shards:
                    self.ready.set()

    async def settle(self, timeout_s: float) -> None:
        """Wait until the shards hold nothing of the closed streams, at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._is_settled:  # noqa: ASYNC110  happens once, at the end
                    await asyncio.sleep(_SETTLE_POLL_S)

    @property
    def _is_settled(self) -> bool:
        shards = self.scheduler.shards.values()
        return not (self._events or self.scheduler.sequences or any(shard.in_flight for shard in shards))

    async def _tick(self) -> None:
        while True:
            self._post(Tick())
            waiting = self.scheduler.waiting
            self._observer.queue_size(len(waiting), sum(bool(sequence.saved_on) for sequence in waiting))
            for name, shard in self.scheduler.shards.items():
                link = self._pool.links.get(name)
                if link is None or link.client is None:
                    continue  # It is lost, and the scheduler has not been told yet.
                self._observer.shard_use(
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
            await asyncio.sleep(_TICK_S)

    def _post(self, event: Event) -> None:
        self._events.append(event)
        self._posted.set()

    def _execute(self, action: Action) -> None:
        match action:
            case Deliver():  # first, since most actions are Delivers
                # The stream is gone if it was closed in the same turn of the loop.
                stream = self._streams.get(action.request_id)
                if stream is not None and stream.deliver(action.prompt_logprobs, action.tokens):
                    del self._streams[action.request_id]
            case Prefill():
                if started := sum(chunk.setup is not None for chunk in action.chunks):
                    self._observer.admitted(started)
                if action.joins is not None:
                    self._observer.joined(action.joins)
                self._pool.links[action.shard].send(action)
            case Decode() | FilterBatch() | Save() | Load() | SetLayout():
                self._pool.links[action.shard].send(action)
            case Fetch():
                self._pool.links[action.target].fetch(action, self._pool.links[action.source].epoch)
            case Drained():
                self._pool.links[action.shard].give_back()
            case Start():
                if (stream := self._streams.get(action.request_id)) is not None:
                    stream.start(action.cached_tokens)
                self._observer.started(action.prompt_tokens, action.cached_tokens)
            case Resume():
                self._observer.resumed(action.computed_again)
            case Preempt():
                self._observer.preempted(action.how)
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
    def model(self) -> ModelFacts | None:
        """The model that the shards serve; None until the first shard has joined."""
        return self._pool.facts

    async def wait_for_model(self) -> None:
        """Wait until the model is known, at most the time that requests wait for a shard."""
        if self.model is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._no_shard_grace_s):
                    await self.ready.wait()

    @property
    def healthy(self) -> bool:
        """Whether at least one shard is leased and makes progress."""
        return bool(self.scheduler.shards)

    def submit(self, spec: GenerationSpec) -> RequestStream:
        """Queue a generation. It starts when a shard can take it."""
        request_id = next(self._request_ids)

        def cancel() -> None:
            self._streams.pop(request_id, None)
            self._post(Cancelled(request_id))

        stream = self._streams[request_id] = RequestStream(cancel, lambda: self.scheduler.state_of(request_id))
        now = time.monotonic()
        request = Request(
            request_id=request_id,
            spec=spec,
            arrived_s=now,
            start_by_s=now + self._queue_timeout_s,
            end_by_s=now + spec.timeout_s,
        )
        self._post(Submitted(request))
        return stream

    def shards(self) -> list[ShardReport]:
        """Return the state of each shard whose address is known."""
        return [self._report(link) for link in self._pool.links.values()]

    def _report(self, link: ShardLink) -> ShardReport:
        report = ShardReport(address=link.address, standing=link.standing, epoch=link.epoch)
        if link.info is None:
            return report
        leased = self.scheduler.shards.get(link.address)
        limits = link.info.limits if leased is None else leased.limits
        return replace(
            report,
            shard_id=link.info.shard_id,
            version=link.info.version,
            model=link.info.facts.name,
            room=ShardRoom(
                max_sequences=limits.max_sequences,
                max_batch_tokens=limits.max_batch_tokens,
                cells=limits.layout.cells,
                cells_per_sequence=limits.layout.cells_per_sequence,
                unified=limits.layout.shares_cells,
            ),
            sequences=0 if leased is None else len(leased.residents),
            used_cells=0 if leased is None else leased.live_cells,
        )

    async def drain_shard(self, address: str) -> bool:
        """Let a shard drain and end; return whether it has agreed. Its sequences move to others where these can."""
        link = self._pool.links.get(address)
        return link is not None and await link.drain()

    def cached_prefixes(self) -> list[ShardPrefixes]:
        """Return what each leased shard keeps of ended sequences."""
        return [shard.prefixes for shard in self.scheduler.shards.values()]

    async def flush_prefixes(self, shards: Collection[str]) -> tuple[ShardPrefixes, ...]:
        """Evict all that ``shards`` keep of ended sequences, and return it. Shards that are not leased are left out."""
        flush_id = next(self._flush_ids)
        waiter: asyncio.Future[tuple[ShardPrefixes, ...]] = asyncio.get_running_loop().create_future()
        self._flushes[flush_id] = waiter
        self._post(FlushRequested(flush_id, frozenset(shards)))
        try:
            return await waiter
        finally:
            del self._flushes[flush_id]

    def _is_free(self, address: str) -> bool:
        """Whether the shard at ``address`` is not leased."""
        return address not in self.scheduler.shards

    def _sequences_on(self, address: str) -> int:
        shard = self.scheduler.shards.get(address)
        return 0 if shard is None else len(shard.residents)
