"""All models of a router, and the links to their shards."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from caravan_router.core.engine import ModelFacts
from caravan_router.core.prefixes import ShardPrefixes
from caravan_router.core.shards import ShardReport, ShardRoom
from caravan_router.engine.batcher import Batcher
from caravan_router.engine.discovery import ShardSource
from caravan_router.engine.link import LinkConfig, ShardLink
from caravan_router.engine.link_pool import LinkPool
from caravan_router.engine.observer import EngineObserver
from caravan_router.engine.shard_info import ShardInfo
from caravan_router.scheduling.config import SchedulerConfig

# The scheduler's deadlines are in seconds, so a coarse clock is enough when nothing else happens.
_TICK_S = 0.5
_SETTLE_POLL_S = 0.01
# Requests for a model wait for a new shard when its last address is gone, as they do with a single model.
_REMEMBERED_S = 600.0


class Fleet:
    """Each model has an engine of its own; a shard says which model it has before it joins.

    A model is known from its first shard on. When the address of its last shard is gone, it stays known

    - until another model joins, if models were served one at a time so far: it was replaced;
    - else for ten minutes, or for good if it is ``expected`` or there is no other;
    - in any case at most until a shard joins that has another file of the same name.

    ``expected`` are the names of models that are sure to join; the first is the default. ``observer_of`` returns the
    observer for the model of a name.
    """

    def __init__(
        self,
        sources: Iterable[ShardSource],
        scheduler_config: SchedulerConfig,
        link_config: LinkConfig,
        observer_of: Callable[[str], EngineObserver],
        expected: Sequence[str] = (),
    ) -> None:
        self.expected = tuple(expected)
        self.strict = bool(expected)
        self._scheduler_config = scheduler_config
        self._observer_of = observer_of
        self._pool = LinkPool(sources, link_config, self)
        # By fingerprint, in the order in which the models joined.
        self._batchers: dict[str, Batcher] = {}
        # Models that are no longer known but still have requests.
        self._leaving: list[Batcher] = []
        # The batcher of each shard that was accepted, by address.
        self._homes: dict[str, Batcher] = {}
        self._runs: dict[Batcher, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()
        # When each model was last seen to have an address, by fingerprint.
        self._seen_s: dict[str, float] = {}
        # Set when a model becomes known, and then replaced.
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled. Raises the exception of a bug, such as a violated invariant."""
        async with self._tasks as tasks:
            tasks.create_task(self._pool.run())
            while True:
                self._forget_models(time.monotonic())
                for batcher in (*self._batchers.values(), *self._leaving):
                    batcher.tick()
                await asyncio.sleep(_TICK_S)

    async def settle(self, timeout_s: float) -> None:
        """Give the shards back once they have saved what they keep of ended sequences; wait at most ``timeout_s``.

        All streams are closed.
        """
        self._pool.let_go()
        for batcher in self._batchers.values():
            batcher.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(batcher.scheduler.shards for batcher in self._batchers.values()):  # noqa: ASYNC110  once, at the end
                    await asyncio.sleep(_SETTLE_POLL_S)

    @property
    def engines(self) -> list[Batcher]:
        """The engine of each known model: the default first, then those that have shards, in order of joining."""
        return sorted(
            self._batchers.values(),
            key=lambda batcher: (batcher.model.name not in self.expected[:1], not batcher.replicas.links),
        )

    def engine(self, name: str) -> Batcher | None:
        """Return the engine of the model of this name, "" for the default; None if it is not known yet."""
        return next((batcher for batcher in self.engines if name in ("", batcher.model.name)), None)

    async def wait_for_model(self, name: str) -> None:
        """Wait until the model of this name is known, "" for any; at most the time that requests wait for a shard."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._scheduler_config.no_shard_grace_s):
                await self._known(name)

    async def wait_until_ready(self) -> None:
        """Wait until each of the ``expected`` models has a shard, or any model if none is expected."""
        for name in self.expected or ("",):
            await (await self._known(name)).ready.wait()

    async def _known(self, name: str) -> Batcher:
        while (batcher := self.engine(name)) is None:
            await self._news.wait()
        return batcher

    @property
    def healthy(self) -> bool:
        """Whether at least one shard of any model is leased and makes progress."""
        return any(batcher.healthy for batcher in self._batchers.values())

    def accept(self, link: ShardLink, info: ShardInfo) -> Batcher | str:
        """Return the engine of the shard's model, or why the shard may not serve beside the others."""
        address, facts = link.address, info.facts
        old = [
            batcher
            for batcher in self._batchers.values()
            if batcher.model.name == facts.name and batcher.model.fingerprint != facts.fingerprint
        ]
        for batcher in old:
            for other in batcher.replicas.links:
                if other != address:
                    return f"it serves {facts.name}, and {other} serves another model of that name"
        home = self._homes.get(address)
        if home is not None and home.model.fingerprint != facts.fingerprint:
            self.forget(address)
        for batcher in old:
            self._retire(batcher)
        batcher = self._batchers.get(facts.fingerprint) or self._add(facts)
        batcher.replicas.add(link, facts)
        self._homes[address] = batcher
        replaced = [known for known in self._batchers.values() if not known.replicas.links]
        if len(self._batchers) - len(replaced) > 1:
            self.strict = True
        elif not self.strict:
            for known in replaced:
                self._retire(known)
        return batcher

    def is_free(self, address: str) -> bool:
        """Whether the shard at ``address`` is not leased."""
        home = self._homes.get(address)
        return home is None or home.is_free(address)

    def load(self, address: str) -> int:
        """Return how many sequences the shard at ``address`` has."""
        home = self._homes.get(address)
        shard = None if home is None else home.scheduler.shards.get(address)
        return 0 if shard is None else len(shard.residents)

    def has_requests(self, fingerprint: str) -> bool:
        """Whether requests for the model of this fingerprint wait or run."""
        batchers = (*self._batchers.values(), *self._leaving)
        return any(batcher.model.fingerprint == fingerprint and batcher.has_requests for batcher in batchers)

    def let_go(self) -> None:
        """Let the shards go that other routers want, but for one of each model, since this router ends."""
        self._pool.let_go()

    def forget(self, address: str) -> None:
        """Forget the shard at ``address``, which is gone or has another model now."""
        if (home := self._homes.pop(address, None)) is not None:
            home.replicas.remove(address)

    def _add(self, facts: ModelFacts) -> Batcher:
        batcher = Batcher(facts, self._scheduler_config, self._observer_of(facts.name))
        self._batchers[facts.fingerprint] = batcher
        self._runs[batcher] = self._tasks.create_task(batcher.run())
        self._news.set()
        self._news = asyncio.Event()
        return batcher

    def _retire(self, batcher: Batcher) -> None:
        del self._batchers[batcher.model.fingerprint]
        self._leaving.append(batcher)

    def _forget_models(self, now: float) -> None:
        for fingerprint, batcher in list(self._batchers.items()):
            if batcher.replicas.links:
                self._seen_s[fingerprint] = now
            elif (
                now - self._seen_s.setdefault(fingerprint, now) > _REMEMBERED_S
                and batcher.model.name not in self.expected
                and len(self._batchers) > 1
            ):
                self._retire(batcher)
        for batcher in [batcher for batcher in self._leaving if batcher.is_settled]:
            self._leaving.remove(batcher)
            if all(other.model.name != batcher.model.name for other in (*self._batchers.values(), *self._leaving)):
                batcher.observer.model_gone()
            self._runs.pop(batcher).cancel()
        self._seen_s = {fingerprint: self._seen_s[fingerprint] for fingerprint in self._batchers}

    def shards(self) -> list[ShardReport]:
        """Return the state of each shard whose address is known."""
        return [self._report(link) for link in self._pool.links.values()]

    def _report(self, link: ShardLink) -> ShardReport:
        report = ShardReport(address=link.address, standing=link.standing, epoch=link.epoch)
        if link.info is None:
            return report
        home = self._homes.get(link.address)
        leased = None if home is None else home.scheduler.shards.get(link.address)
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
                draft_tokens=limits.draft_tokens,
            ),
            batch_invariant=link.info.batch_invariant,
            sequences=0 if leased is None else len(leased.residents),
            used_cells=0 if leased is None else leased.live_cells,
        )

    async def drain_shard(self, address: str) -> bool:
        """Let a shard drain and end; return whether it has agreed. Its sequences move to others where these can."""
        link = self._pool.links.get(address)
        return link is not None and await link.drain()

    def cached_prefixes(self) -> list[ShardPrefixes]:
        """Return what each leased shard keeps of ended sequences."""
        return [prefixes for batcher in self._batchers.values() for prefixes in batcher.cached_prefixes()]

    async def flush_prefixes(self, shards: Collection[str]) -> list[ShardPrefixes]:
        """Evict all that ``shards`` keep of ended sequences, and return it. Shards that are not leased are left out."""
        flushed = await asyncio.gather(*(batcher.flush_prefixes(shards) for batcher in self._batchers.values()))
        return [prefixes for of_model in flushed for prefixes in of_model]
