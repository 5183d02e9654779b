"""One shard as the router sees it: connect, take the lease, carry out commands, notice the end, start over.

A shard obeys one router at a time, the one with the newest epoch. A router takes a shard with an epoch one above the
last:

- at once, if no router holds it, if the last lease was its own, or if it never held this shard: a router that was just
  started replaces the one before it without waiting for that one's lease to expire;
- otherwise another router took the shard from it, and it stands by: it asks again after a delay that grows, with
  jitter, and takes the shard once the other router's lease has expired.

So two routers that were given the same shard do not take it from each other in turns: the newer one keeps it.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from caravan_router.engine.client import Reply, ShardClient, ShardRpcError
from caravan_router.engine.fleet import ShardInfo
from caravan_router.engine.observer import EngineObserver, Method
from caravan_router.scheduling.actions import Command, Decode, FilterBatch
from caravan_router.scheduling.events import (
    CommandEnded,
    Event,
    ShardDraining,
    ShardJoined,
    ShardLost,
    StepOutcome,
    Stepped,
)

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Settings of the links to all shards.

    ``router_id`` names the holder of the leases. A lease ends ``lease_ttl_s`` seconds after its last renewal. Every
    ``heartbeat_s`` seconds the router renews it and the shard reports its steps; a shard that has work and completes no
    step for ``step_timeout_s`` seconds is given up. A decode step that follows the last reply within
    ``stream_interval_ms`` is reported with the next step.
    """

    router_id: str
    lease_ttl_s: float = 15.0
    heartbeat_s: float = 1.0
    step_timeout_s: float = 60.0
    stream_interval_ms: int = 20


class _SessionError(Exception):
    """Why a session with the shard ended or could not start, apart from a failed call."""


class _DrainedError(_SessionError):
    """The shard drained and ended as planned."""


@dataclass(frozen=True, slots=True)
class _Sent:
    command: Command
    replies: AsyncIterator[Sequence[Reply]]
    at: float


class ShardLink:
    """Owns the connection to one shard and posts what happens there as events.

    ``accept`` judges a shard before it joins: it returns a reason to refuse the shard, or None.
    """

    def __init__(
        self,
        address: str,
        config: LinkConfig,
        *,
        post: Callable[[Event], None],
        accept: Callable[[str, ShardInfo], str | None],
        observer: EngineObserver,
    ) -> None:
        self.address = address
        self._config = config
        self._post = post
        self._accept = accept
        self._observer = observer
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._last_step_end = 0.0
        # Incarnation and epoch of the last lease this router held; None before the first.
        self._last_lease: tuple[str, int] | None = None
        # For calls other than commands; None while the shard is not leased.
        self.client: ShardClient | None = None

    def send(self, command: Command) -> None:
        """Queue ``command``; a running Decode yields to it."""
        self._commands.put_nowait(command)

    async def run(self) -> None:
        """Keep the shard leased, or wait for it, until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            joined_at = time.monotonic()
            try:
                await self._session()
            except* (ShardRpcError, _SessionError) as errors:
                level = logging.DEBUG if self.client is None else logging.WARNING
                if any(isinstance(error, _DrainedError) for error in errors.exceptions):
                    level = logging.INFO
                reason = "; ".join(str(error) for error in errors.exceptions)
                _log.log(level, "shard is not available", extra={"shard": self.address, "reason": reason})
            finally:
                self._leave()
            if time.monotonic() - joined_at > _MAX_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            # Jitter: routers and links that lost the same host must not come back at the same moment.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    def _leave(self) -> None:
        if self.client is not None:
            self.client = None
            self._commands = asyncio.Queue()
            self._observer.shard_gone(self.address)
            self._post(ShardLost(self.address))

    async def _session(self) -> None:
        """Hold the shard from connecting to its end. Raise ShardRpcError or _SessionError, or a group of them."""
        client = ShardClient(self.address, self._config.step_timeout_s, self._config.stream_interval_ms)
        try:
            info = await client.info()
            epoch = await self._take(client, info)
            self.client = client
            runs = await client.saved_runs()
            self._post(ShardJoined(self.address, info.limits, runs))
            cells = info.limits.layout.cells
            _log.info(
                "shard joined", extra={"shard": self.address, "epoch": epoch, "cells": cells, "saved_runs": len(runs)}
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew(client, epoch))
                tasks.create_task(self._watch(client))
                tasks.create_task(self._carry_out(client, epoch))
        finally:
            await client.close()

    async def _take(self, client: ShardClient, info: ShardInfo) -> int:
        """Take the lease and return its epoch."""
        refusal = self._accept(self.address, info)
        if refusal is not None:
            _log.error("shard refused", extra={"shard": self.address, "reason": refusal})
            raise _SessionError(refusal)
        if info.leased and self._last_lease not in (None, (info.incarnation, info.epoch)):
            raise _SessionError("another router holds the shard")
        epoch = info.epoch + 1
        await client.lease(self._config.router_id, epoch, self._config.lease_ttl_s)
        self._last_lease = (info.incarnation, epoch)
        return epoch

    async def _renew(self, client: ShardClient, epoch: int) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            await client.lease(self._config.router_id, epoch, self._config.lease_ttl_s)

    async def _watch(self, client: ShardClient) -> None:
        """Post that the shard drains; raise once it ends, or has work and completes no step for too long."""
        last_steps, moved_at, draining = -1, time.monotonic(), False
        async with contextlib.aclosing(client.watch(self._config.heartbeat_s)) as statuses:
            async for status in statuses:
                if status.draining and not draining:
                    draining = True
                    self._post(ShardDraining(self.address))
                if status.steps != last_steps or not status.busy:
                    last_steps, moved_at = status.steps, time.monotonic()
                elif time.monotonic() - moved_at > self._config.step_timeout_s:
                    raise _SessionError(f"no step completed for {self._config.step_timeout_s:g} s")
        # The last replies may still be on their way.
        await self._commands.join()
        raise _DrainedError("the shard ended") if draining else _SessionError("the shard ended")

    async def _carry_out(self, client: ShardClient, epoch: int) -> None:
        """Send commands in order. The next is sent while the last one runs, so that the shard need not wait for it."""
        commands = self._commands

        async def start_next() -> _Sent:
            command = await commands.get()
            sent_at = time.monotonic()
            return _Sent(command, await client.start(command, epoch), sent_at)

        current = await start_next()
        while True:
            successor = asyncio.create_task(start_next())
            try:
                await self._collect(current)
                commands.task_done()
                current = await successor
            finally:
                successor.cancel()
                # Retrieve its result, so that a failure of both is reported once.
                await asyncio.gather(successor, return_exceptions=True)

    async def _collect(self, sent: _Sent) -> None:
        """Post the replies to a command and its end."""
        # Time in which the shard had no command is not overhead.
        self._last_step_end = max(self._last_step_end, sent.at)
        async for replies in sent.replies:
            self._observe(sent.command, replies)
            for reply in replies:
                self._post(reply)
        if isinstance(sent.command, FilterBatch):
            self._observer.filtered(time.monotonic() - sent.at)
        self._post(CommandEnded(self.address, sent.command.command_id))

    def _observe(self, command: Command, replies: Sequence[Reply]) -> None:
        steps = [reply for reply in replies if isinstance(reply, Stepped)]
        if not steps:
            return
        method = Method.DECODE if isinstance(command, Decode) else Method.PREFILL
        now = time.monotonic()
        elapsed, self._last_step_end = now - self._last_step_end, now
        overhead_s = max(0.0, elapsed - sum(step.forward_s for step in steps)) / len(steps)
        for step in steps:
            if step.outcome is StepOutcome.OK:
                self._observer.step(step, method, overhead_s=overhead_s)
            else:
                self._observer.step_failed(method)
