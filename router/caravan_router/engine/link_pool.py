"""The links to all known shards, which come and go with their addresses."""

import asyncio
import functools
import logging
from collections.abc import Iterable
from typing import Protocol

from caravan_router.engine.discovery import Discovery, ShardSource
from caravan_router.engine.link import Home, LinkConfig, ShardLink
from caravan_router.engine.shard_info import ShardInfo

_log = logging.getLogger(__name__)

_CHECK_S = 0.2


class LinkUser(Protocol):
    """The fleet that the shards form."""

    def accept(self, link: ShardLink, info: ShardInfo) -> Home | str:
        """Return what the shard works for, or why it may not serve beside the others."""
        ...

    def is_free(self, address: str) -> bool:
        """Whether the shard at ``address`` is not leased."""
        ...

    def forget(self, address: str) -> None:
        """Forget the shard at ``address``, an address that is gone."""


class LinkPool:
    """Has one link for each address that ``sources`` have.

    A shard whose address is gone is drained: it gets no new sequences, and its link ends with the lease, or when the
    shard is lost. An address that comes back meanwhile gets a new link then.
    """

    def __init__(self, sources: Iterable[ShardSource], config: LinkConfig, user: LinkUser) -> None:
        self._config = config
        self._user = user
        self._discovery = Discovery(sources, config.address_refresh_s, self._note_addresses)
        self._listed: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        # The tasks of the links that were not cancelled, by address.
        self._running: dict[str, asyncio.Task[None]] = {}
        # By address, in the order in which the addresses became known.
        self.links: dict[str, ShardLink] = {}

    async def run(self) -> None:
        """Keep the links until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._discovery.run())
            try:
                while True:
                    self._update(tasks)
                    leaving = any(link.retired for link in self.links.values())
                    await self._wait(_CHECK_S if leaving else None)
            finally:
                for link in self.links.values():
                    link.retired = True

    def _update(self, tasks: asyncio.TaskGroup) -> None:
        """Start links for new addresses, and end those whose address is gone once nothing runs there."""
        for address in sorted(self._listed - self.links.keys()):
            link = self.links[address] = self._make_link(address)
            self._running[address] = task = tasks.create_task(link.run())
            task.add_done_callback(functools.partial(self._forget, address))
        for address, link in self.links.items():
            if address not in self._listed:
                link.retire()
            if link.retired and address in self._running and self._user.is_free(address):
                self._running.pop(address).cancel()

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
        _log.info("the addresses of shards changed", extra={"added": added, "gone": gone})
        self._listed = listed
        self._changed.set()

    def _make_link(self, address: str) -> ShardLink:
        return ShardLink(address, self._config, accept=self._accept)

    def _accept(self, link: ShardLink, info: ShardInfo) -> Home | str:
        for address, other in self.links.items():
            if other is not link and other.lease == (info.incarnation, info.epoch) and info.leased:
                return f"it is the shard at {address}"
        return self._user.accept(link, info)
