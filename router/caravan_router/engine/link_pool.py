"""The links to all known shards, which come and go with their addresses."""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Iterable
from typing import Protocol

from caravan_proto.messages.model import ShardClaim
from caravan_router.engine.command_runner import EventSink
from caravan_router.engine.discovery import Discovery, ShardSource
from caravan_router.engine.link import LinkOwner, ShardLink
from caravan_router.engine.link_config import LinkConfig
from caravan_router.engine.shard_calls import ShardInfo
from caravan_router.engine.wall import lasting, log_bug
from caravan_scheduler.core.shards import ShardState

_log = logging.getLogger(__name__)

_CHECK_S = 0.2
# Before another shard goes to another router: until all shards have heard how many it holds now.
_SHARE_PAUSE_S = 3.0
# A router with requests keeps its only shard for this many seconds before one whose requests wait has its turn.
_TURN_S = 2.0


class LinkUser(Protocol):
    """The fleet, which decides what each shard is used for."""

    def accept(self, link: ShardLink, info: ShardInfo) -> EventSink | str:
        """Return the engine of the shard's model, or why the shard may not serve beside the others."""
        ...

    def is_free(self, address: str) -> bool:
        """Whether the shard at ``address`` is not leased."""
        ...

    def load(self, address: str) -> int:
        """Return how many sequences the shard at ``address`` has."""
        ...

    def has_requests(self, fingerprint: str) -> bool:
        """Whether requests for the model of this fingerprint wait or run."""
        ...

    def is_other(self, link: ShardLink, info: ShardInfo) -> bool:
        """Whether what is known now of a shard's files tells it from the other shards of its engine."""
        ...

    def forget(self, address: str) -> None:
        """Forget the shard at ``address``, an address that is gone."""


class LinkPool:
    """Has one link for each address that ``sources`` have.

    A shard whose address is gone is drained: it gets no new sequences, and its link ends with the lease, or when the
    shard is lost. An address that comes back meanwhile gets a new link then.

    Routers with the same shards share them out, those of each model apart: a router that hears that another one wants a
    shard drains it for that one if it keeps at least as many, one shard at a time. Where shards are fewer than routers,
    they take turns: a router whose requests wait for a shard gets the only one of another that has no requests, or has
    had its turn. What comes then is for the other one, see `Fleet.neighbour`. A router that ends lets all go but one,
    which serves what is left until the end. If it loses that one, it asks for another, which it gets in its turn.
    """

    def __init__(self, sources: Iterable[ShardSource], config: LinkConfig, user: LinkUser) -> None:
        self._config = config
        self._user = user
        self._changed = asyncio.Event()
        self._owner = LinkOwner(
            accept=self._accept, is_other=user.is_other, claim=self._claim, on_wanted=self._changed.set
        )
        self._discovery = Discovery(sources, config.address_refresh_s, self._note_addresses)
        self._listed: frozenset[str] = frozenset()
        # The tasks of the links that were not cancelled, by address.
        self._running: dict[str, asyncio.Task[None]] = {}
        # By address, in the order in which the addresses became known.
        self.links: dict[str, ShardLink] = {}
        self._ends = False
        # When a shard was last on its way to another router, by the fingerprint of its model.
        self._yielded_s: dict[str, float] = {}

    def let_go(self) -> None:
        """Let the shards go that other routers want, but for one of each model, since this router ends."""
        self._ends = True
        self._changed.set()

    async def run(self) -> None:
        """Keep the links until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lasting(self._discovery.run, "the lookup of the shards' addresses"))
            try:
                while True:
                    try:
                        self._update(tasks)
                    except Exception:  # noqa: BLE001  whatever a bug raises
                        log_bug("the shards could not be shared out")
                    must_check = any(link.retired or link.turns.wanted_by is not None for link in self.links.values())
                    await self._wait(_CHECK_S if must_check else None)
            finally:
                for link in self.links.values():
                    link.retired = True

    def _update(self, tasks: asyncio.TaskGroup) -> None:
        """Start links for new addresses, and end those whose address is gone once nothing runs there."""
        for address in sorted(self._listed - self.links.keys()):
            link = self.links[address] = self._make_link(address)
            self._running[address] = task = tasks.create_task(lasting(link.run, f"the link to {address}"))
            task.add_done_callback(functools.partial(self._forget, address))
        for address, link in self.links.items():
            if address not in self._listed:
                link.retire()
            if link.retired and address in self._running and self._user.is_free(address):
                self._running.pop(address).cancel()
        self._share()

    def _share(self) -> None:
        """Let go shards that another router wants, at most one of each model at a time."""
        held: dict[str, list[ShardLink]] = {}
        for link in self.links.values():
            if link.client is not None and link.info is not None:
                held.setdefault(link.info.facts.fingerprint, []).append(link)
        now = time.monotonic()
        for fingerprint, links in held.items():
            if any(link.turns.yields_for_s for link in links):
                self._yielded_s[fingerprint] = now
                continue
            wanted = [link for link in links if self._should_yield(link, len(links), fingerprint)]
            is_heard = now - self._yielded_s.get(fingerprint, -math.inf) >= _SHARE_PAUSE_S
            if wanted and (self._ends or is_heard or any(link.turns.is_wanted_urgently for link in wanted)):
                # The one with the least to move.
                link = min(wanted, key=lambda link: self._user.load(link.address))
                link.yield_shard(lend=len(links) == 1 and link.turns.is_wanted_urgently)

    def _should_yield(self, link: ShardLink, held: int, fingerprint: str) -> bool:
        if link.turns.wanted_by is None or link.standing.state is not ShardState.SERVING:
            return False
        if self._ends:
            return held > 1
        if link.turns.wanted_by.urgent and held == 1:
            had_turn = time.monotonic() - link.standing.since_s >= _TURN_S
            return had_turn or not self._user.has_requests(fingerprint)
        return link.turns.wanted_by.urgent or held - 1 > link.turns.wanted_by.held

    def _claim(self, fingerprint: str) -> ShardClaim | None:
        """Return what to ask for another shard of the model with; None if this router needs no more of them."""
        links = [
            link
            for link in self.links.values()
            if link.client is not None and link.info is not None and link.info.facts.fingerprint == fingerprint
        ]
        is_served = any(link.standing.state is ShardState.SERVING for link in links)
        if not is_served and self._user.has_requests(fingerprint):
            return ShardClaim(len(links), urgent=True)
        return None if self._ends else ShardClaim(len(links))

    def _forget(self, address: str, _task: asyncio.Task[None]) -> None:
        del self.links[address]
        self._running.pop(address, None)
        self._user.forget(address)
        self._changed.set()

    async def _wait(self, at_most_s: float | None) -> None:
        """Wait until the listed addresses change, ``at_most_s`` seconds."""
        try:
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _note_addresses(self, listed: frozenset[str]) -> None:
        added, gone = sorted(listed - self._listed), sorted(self._listed - listed)
        if not (added or gone):
            return
        # At the start they are those of the configuration.
        level = logging.INFO if self._listed else logging.DEBUG
        _log.log(level, "the addresses of shards changed", extra={"added": added, "gone": gone})
        self._listed = listed
        self._changed.set()

    def _make_link(self, address: str) -> ShardLink:
        return ShardLink(address, self._config, self._owner)

    def _accept(self, link: ShardLink, info: ShardInfo) -> EventSink | str:
        for address, other in self.links.items():
            if other is not link and other.lease == (info.incarnation, info.epoch) and info.leased:
                return f"it is the shard at {address}"
        return self._user.accept(link, info)
