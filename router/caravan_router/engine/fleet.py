"""All models of a router, and the links to their shards."""

import asyncio
import contextlib
import functools
import itertools
import logging
import operator
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from caravan_proto.messages.adapters import AdapterSource, source_problem
from caravan_router.engine.absence import Absence
from caravan_router.engine.batcher import Batcher
from caravan_router.engine.demand import Demand
from caravan_router.engine.discovery import AddressBook, ShardSource
from caravan_router.engine.link import ShardLink
from caravan_router.engine.link_config import LinkConfig
from caravan_router.engine.link_pool import LinkPool
from caravan_router.engine.model_prefixes import ModelPrefixes
from caravan_router.engine.observer import EngineObserver
from caravan_router.engine.replacement import find_engine, may_be_same, serving
from caravan_router.engine.shard_calls import ShardInfo
from caravan_router.engine.viewers import Viewers
from caravan_router.engine.wall import guarded, lasting
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.engine import ModelFacts, ModelNames
from caravan_scheduler.core.errors import NoShardError
from caravan_scheduler.core.prefixes import PinRefusal, PrefixReport, ShardPrefixes
from caravan_scheduler.core.shards import ShardReport, ShardRoom, ShardState

_log = logging.getLogger(__name__)
# The scheduler's deadlines are in seconds, so a coarse clock is enough when nothing else happens.
_TICK_S = 0.5
_SETTLE_POLL_S = 0.01
_JOIN_POLL_S = 0.01
# Requests for a model wait for a new shard when its last address is gone, as they do with a single model.
_REMEMBERED_S = 600.0
# Requests wait so long for a shard of their model that was lost, while other weights of that name are served.
_REPLACED_S = 5.0
# Its shard may serve again.
_PRESENT = (ShardState.SERVING, ShardState.STANDBY, ShardState.DRAINING)


def report_of(link: ShardLink, batcher: Batcher | None) -> ShardReport:
    """Return the state of the shard of ``link``; ``batcher``: the engine that commands it, if there is one."""
    report = ShardReport(address=link.address, standing=link.standing, epoch=link.epoch)
    if link.info is None:
        return report
    leased = None if batcher is None else batcher.scheduler.shards.get(link.address)
    limits = link.info.limits if leased is None else leased.capacity.limits
    return replace(
        report,
        shard_id=link.info.shard_id,
        version=link.info.version,
        model=link.info.facts.name,
        model_fingerprint=link.info.facts.sha256,
        room=ShardRoom(
            max_sequences=limits.max_sequences,
            max_batch_tokens=limits.max_batch_tokens,
            cells=limits.layout.cells,
            cells_per_sequence=limits.layout.cells_per_sequence,
            unified=limits.layout.shares_cells,
            draft_tokens=limits.draft_tokens,
        ),
        numerics=link.info.numerics,
        sequences=0 if leased is None else len(leased.stays.residents),
        used_cells=0 if leased is None else leased.cells.live,
        adapters=() if leased is None or batcher is None else batcher.adapters.loaded,
    )


class FleetPrefixes:
    """Asks the engine that has a prefix. ``batchers``: those of the known models, which come and go."""

    def __init__(self, batchers: Collection[Batcher]) -> None:
        self._batchers = batchers

    def cached_prefixes(self) -> list[ShardPrefixes]:
        """Return what each leased shard keeps of ended sequences."""
        return [prefixes for batcher in self._batchers for prefixes in batcher.prefixes.cached_prefixes()]

    async def flush_prefixes(self, shards: Collection[str]) -> list[ShardPrefixes]:
        """Evict all that ``shards`` keep of ended sequences, and return it. Shards that are not leased are left out."""
        models = [batcher.prefixes for batcher in self._batchers]
        flushed = await asyncio.gather(*(prefixes.flush_prefixes(shards) for prefixes in models))
        return [prefixes for of_model in flushed for prefixes in of_model]

    def find_prefix(self, prefix_id: str) -> PrefixReport | None:
        """Return the prefix of this id; None if no shard has it and it is not pinned."""
        found = self._home_of(prefix_id)
        return None if found is None else found[0].find_prefix(found[1])

    async def drop_prefix(self, prefix_id: str) -> PrefixReport | None:
        """Evict the prefix of this id from all shards, and pin it no longer. Return it as it was, if it was."""
        found = self._home_of(prefix_id)
        return None if found is None else await found[0].drop_prefix(found[1])

    def pins(self) -> list[PrefixReport]:
        """Return the pinned prefixes of all models, the first pinned of each first."""
        return [report for batcher in self._batchers for report in batcher.prefixes.pins()]

    async def pin_prefix(self, prefix_id: str) -> PrefixReport | PinRefusal | None:
        """Let a prefix stay that a shard has. Return it, or why not; None if no shard has it and it is not pinned."""
        found = self._home_of(prefix_id)
        return None if found is None else await found[0].pin_prefix(found[1])

    def unpin_prefix(self, prefix_id: str) -> PrefixReport | None:
        """Let a prefix make way for others again, and return it; None if it is not pinned."""
        found = self._home_of(prefix_id)
        return None if found is None else found[0].unpin_prefix(found[1])

    def _home_of(self, prefix_id: str) -> tuple[ModelPrefixes, bytes] | None:
        """Return the prefixes of the model that has such ids, and the key of the prefix there; None if none has."""
        keys = ((batcher.prefixes, batcher.prefixes.key_of(prefix_id)) for batcher in self._batchers)
        return next(((prefixes, key) for prefixes, key in keys if key is not None), None)


class FleetAdapters:
    """Loads and unloads adapters. ``batchers``: those of the known models, which come and go."""

    def __init__(
        self, batchers: Collection[Batcher], engine: Callable[[str], Batcher | None], names: ModelNames
    ) -> None:
        """``engine`` returns the engine that serves a name."""
        self._batchers = batchers
        self._engine = engine
        self._names = names

    async def load(self, model: str, source: AdapterSource, *, replaces: bool) -> str:
        """Load an adapter on every shard of a model, and on those to come. Return why not, "" if it is served now.

        Raises NoShardError.
        """
        if problem := source_problem(source):
            return problem
        engine = self._engine(model)
        if engine is None:
            raise NoShardError(model=model)
        taken = {*self._names.expected, *self._names.aliases}
        for known in self._batchers:
            own = known.adapters.names if known is engine else ()
            taken |= {known.model.name, *known.model.aliases, *known.model.adapters} - {*own}
        if source.name in taken:
            return f"lora_name must not be the name of another model or adapter. Given: {source.name!r}"
        problem = await engine.adapters.load(source, replaces=replaces)
        if not problem:
            self._names.unloaded.discard(source.name)
        return problem

    def unload(self, name: str) -> bool:
        """Serve no more requests with an adapter that was loaded so; return whether there was one."""
        holders = [batcher.adapters for batcher in self._batchers if name in batcher.adapters.names]
        for adapters in holders:
            adapters.unload(name)
            self._names.unloaded.add(name)
        return bool(holders)


@dataclass(slots=True)
class _Last:
    """When a model last had an address that is listed, and a shard, in seconds on ``time.monotonic``."""

    listed_s: float
    present_s: float


def _by_name(batchers: Iterable[Batcher]) -> list[list[Batcher]]:
    named: dict[str, list[Batcher]] = {}
    for batcher in batchers:
        named.setdefault(batcher.model.name, []).append(batcher)
    return list(named.values())


class Fleet:
    """Each model has an engine of its own; a shard says which model it has before it joins.

    A model is known from its first shard on. When the address of its last shard is gone, it stays known

    - until another model joins, if models were served one at a time so far: it was replaced;
    - else for ten minutes, or for good if it is ``expected`` or there is no other.

    Shards with other weights under the same name have an engine of their own, while the name is rolled out: see
    `replacement`. An engine without shards passes its requests on to the other.

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
        self.names = ModelNames(expected=tuple(expected), strict=bool(expected))
        request_ids = itertools.count(1)

        def make_batcher(facts: ModelFacts) -> Batcher:
            former = next((one for one in reversed(self._batchers) if one.model.name == facts.name), None)
            return Batcher(facts, scheduler_config, guarded(observer_of(facts.name)), request_ids, former)

        self._make_batcher = make_batcher
        self._config = link_config
        # Shards that this program starts while it runs.
        self.started_here = AddressBook()
        self._pool = LinkPool((*sources, self.started_here), link_config, self)
        # In the order in which the models joined.
        self._batchers: list[Batcher] = []
        # Models that are no longer known but still have requests.
        self._leaving: list[Batcher] = []
        # The batcher of each shard that was accepted, by address.
        self._batcher_of: dict[str, Batcher] = {}
        self._runs: dict[Batcher, asyncio.Task[None]] = {}
        self.prefix_cache = FleetPrefixes(self._batchers)
        self.adapters = FleetAdapters(self._batchers, self.engine, self.names)
        self.timeline = Viewers(self._batchers)
        self._tasks = asyncio.TaskGroup()
        # Whether a model that is no longer known had a shard.
        self._served = False
        self._last: dict[Batcher, _Last] = {}
        self.demand = Demand(self, Absence(scheduler_config.no_shard_grace_s))

    async def run(self) -> None:
        """Serve until cancelled. A bug ends the request that has met it, or the sessions with the shards of a model.

        Unless the fleet outlives bugs, it raises one that every call of a scheduler meets.
        """

        async def tick() -> None:
            while True:
                self._forget_models(time.monotonic())
                for named in _by_name((*self._batchers, *self._leaving)):
                    for batcher in named:
                        batcher.tick()
                    named[0].observer.queue(functools.reduce(operator.add, (batcher.queue for batcher in named)))
                await asyncio.sleep(_TICK_S)

        async with self._tasks as tasks:
            tasks.create_task(self._pool.run())
            await lasting(tick, "the clock of the schedulers")

    async def settle(self, timeout_s: float) -> None:
        """Give the shards back once they have saved what they keep of ended sequences; wait at most ``timeout_s``.

        All streams are closed.
        """
        self._pool.let_go()
        for batcher in self._batchers:
            batcher.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(batcher.scheduler.shards for batcher in self._batchers):  # noqa: ASYNC110  once, at the end
                    await asyncio.sleep(_SETTLE_POLL_S)

    @property
    def engines(self) -> list[Batcher]:
        """The engine that serves each known name: the default first, then those that have shards, by joining."""
        return sorted(
            map(serving, _by_name(self._batchers)),
            key=lambda batcher: (batcher.model.name not in self.names.expected[:1], not batcher.replicas.links),
        )

    def engine(self, name: str) -> Batcher | None:
        """Return the engine of the model of this name, "" for the default; None if it is not known yet."""
        return next((batcher for batcher in self.engines if name in ("", batcher.model.name)), None)

    async def wait_for_model(self, name: str) -> None:
        """Wait until the model of this name is known, "" for any; at most the time that requests wait for a shard.

        Raises NoShardError if it is not known then.
        """
        await self.demand.wait_for_model(name)

    def batchers(self, name: str) -> list[Batcher]:
        """Return all engines of a name, those that only have requests left included."""
        batchers = (*self._batchers, *self._leaving)
        return [batcher for batcher in batchers if batcher.model.name == name]

    async def wait_until_ready(self) -> None:
        """Wait until each of the ``expected`` models has a shard, or any model if none is expected."""
        for name in self.names.expected or ("",):
            await (await self.demand.known(name)).ready.wait()

    @property
    def healthy(self) -> bool:
        """Whether at least one shard of any model is leased and makes progress."""
        return self.names.load_on_demand or any(batcher.healthy for batcher in self._batchers)

    @property
    def ready(self) -> bool:
        """Whether a shard of any model was leased since the start."""
        joined = any(batcher.ready.is_set() for batcher in self._batchers)
        return self.names.load_on_demand or self._served or joined

    def accept(self, link: ShardLink, info: ShardInfo) -> Batcher | str:
        """Return the engine of the shard's model, or why the shard may not serve beside the others."""
        address, facts = link.address, info.facts
        former = self._batcher_of.get(address)
        if former is not None and not may_be_same(former.model, facts):
            self.forget(address)
        batcher = find_engine(self._batchers, facts, former) or self._add(facts)
        batcher.replicas.add(link, facts)
        self._batcher_of[address] = batcher
        self._replace_engines(time.monotonic())
        absent = [known for known in self._batchers if not known.replicas.links]
        if len({known.model.name for known in self._batchers if known not in absent}) > 1:
            self.names.strict = True
        elif not self.names.strict:
            for known in absent:
                self._retire(known)
        return batcher

    def is_other(self, link: ShardLink, info: ShardInfo) -> bool:
        """Whether what is known now of a shard's files tells it from the other shards of its engine."""
        batcher = self._batcher_of.get(link.address)
        return batcher is not None and not may_be_same(batcher.model, info.facts)

    def _replace_engines(self, now: float) -> None:
        """End engines that have no shard left, and of whose name another one serves, which gets their requests."""
        for named in _by_name(self._batchers):
            successor = serving(named)
            for batcher in named:
                links = batcher.replicas.links.values()
                if any(link.standing.state in _PRESENT for link in links) or batcher.healthy:
                    self._last[batcher].present_s = now
                    continue
                lost_for_s = now - self._last[batcher].present_s
                is_given_up = successor.healthy and lost_for_s >= _REPLACED_S
                if batcher is not successor and (is_given_up or not links):
                    _log.info(
                        "other weights replaced a model",
                        extra={"model": batcher.model.name, "sha256": batcher.model.sha256},
                    )
                    self._retire(batcher)
                    batcher.replace_by(successor)

    def is_free(self, address: str) -> bool:
        """Whether the shard at ``address`` is not leased."""
        batcher = self._batcher_of.get(address)
        return batcher is None or batcher.is_free(address)

    def load(self, address: str) -> int:
        """Return how many sequences the shard at ``address`` has."""
        batcher = self._batcher_of.get(address)
        shard = None if batcher is None else batcher.scheduler.shards.get(address)
        return 0 if shard is None else len(shard.stays.residents)

    def has_requests(self, fingerprint: str) -> bool:
        """Whether requests for the model of this fingerprint wait or run."""
        batchers = (*self._batchers, *self._leaving)
        return any(batcher.model.fingerprint == fingerprint and batcher.has_requests for batcher in batchers)

    def let_go(self) -> None:
        """Let the shards go that other routers want, but for one of each model, since this router ends."""
        self._pool.let_go()

    def forget(self, address: str) -> None:
        """Forget the shard at ``address``, which is gone or has another model now."""
        if (batcher := self._batcher_of.pop(address, None)) is not None:
            batcher.replicas.remove(address)

    def _add(self, facts: ModelFacts) -> Batcher:
        for known in self._batchers:
            if known.model.name == facts.name:
                _log.warning(
                    "a model joins with other weights than shards of that name: the weights with more shards serve",
                    extra={"model": facts.name, "sha256": facts.sha256, "known": known.model.sha256},
                )
        batcher = self._make_batcher(facts)
        self.timeline.note_engine(batcher)
        self._batchers.append(batcher)
        self._last[batcher] = _Last(time.monotonic(), time.monotonic())
        what = f"the engine of {facts.name}"
        work = lasting(batcher.run, what) if self._config.outlives_bugs else batcher.run()
        self._runs[batcher] = self._tasks.create_task(work)
        self.demand.note_model(batcher)
        return batcher

    def _retire(self, batcher: Batcher) -> None:
        self.names.unloaded.update(batcher.adapters.names)
        self._batchers.remove(batcher)
        del self._last[batcher]
        self._served = self._served or batcher.ready.is_set()
        self._leaving.append(batcher)

    def _forget_models(self, now: float) -> None:
        self._replace_engines(now)
        for batcher in list(self._batchers):
            if batcher.replicas.links:
                self._last[batcher].listed_s = now
            elif (
                batcher.model.name not in self.names.expected
                and (now - self._last[batcher].listed_s > _REMEMBERED_S or self.names.load_on_demand)
                and (len(self._batchers) > 1 or self.names.load_on_demand)
            ):
                self._retire(batcher)
        for batcher in [batcher for batcher in self._leaving if batcher.is_settled]:
            self._leaving.remove(batcher)
            if all(other.model.name != batcher.model.name for other in (*self._batchers, *self._leaving)):
                batcher.observer.model_gone()
            self._runs.pop(batcher).cancel()

    @property
    def hands_over(self) -> bool:
        """Whether a request may be for another router, as `neighbour` says."""
        return any(not one.healthy or _borrowed(one.replicas.links.values()) for one in self._batchers)

    def neighbour(self, name: str) -> str | None:
        """Return the URL of a router that requests of the model are for now.

        It holds a shard of the model, of which this one holds none; or it has lent this one its only shard, for what
        had begun here. A router that has lent its only shard keeps its requests, since it has the shard back soon: if
        each began the other's requests in its turn, none would have the shard for good.
        """
        engine = self.engine(name)
        if engine is None:
            return None
        named = (batcher for batcher in self._batchers if batcher.model.name == engine.model.name)
        links = [link for batcher in named for link in batcher.replicas.links.values()]
        if engine.healthy:
            urls = {link.turns.lender for link in _borrowed(links)}
        elif any(link.turns.lent for link in links):
            return None
        else:
            urls = {
                (link.info.holder_url if link.standing.state is ShardState.STANDBY else "") or link.turns.returned_to
                for link in links
                if link.info is not None
            }
        others = sorted(urls - {"", self._config.url})
        return random.choice(others) if others else None  # noqa: S311  any of them will do

    def shards(self) -> list[ShardReport]:
        """Return the state of each shard whose address is known."""
        return [report_of(link, self._batcher_of.get(link.address)) for link in self._pool.links.values()]

    async def drain_shard(self, address: str) -> bool:
        """Let a shard drain and end; return whether it has agreed. Its sequences move to others where these can."""
        link = self._pool.links.get(address)
        return link is not None and await link.drain()


def _borrowed(links: Iterable[ShardLink]) -> list[ShardLink]:
    """Return the links of the shards that are leased, if all of them are borrowed."""
    leased = [link for link in links if link.client is not None]
    return leased if all(link.turns.is_borrowed for link in leased) else []
