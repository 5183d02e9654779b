"""The life of a shard as the router sees it: connect, lease, carry out commands, notice its end, begin again."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from caravan_router.engine import codec
from caravan_router.engine.client import ShardClient, ShardRpcError, StartedCommand
from caravan_router.engine.observer import EngineObserver, Method, StepReport
from caravan_router.scheduling.actions import Command, Decode, FilterBatch, SwapIn, SwapOut
from caravan_router.scheduling.events import (
    CommandEnded,
    Event,
    ShardDraining,
    ShardJoined,
    ShardLost,
    StepOutcome,
    Stepped,
    SwappedIn,
    SwappedOut,
)

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Who leases, for how long without a heartbeat, and how long a pass may take before the shard is given up."""

    router_id: str
    lease_ttl_s: float = 15.0
    heartbeat_s: float = 1.0
    step_timeout_s: float = 60.0


class _Stalled(Exception):
    """The shard answers, but its passes stand still."""


@dataclass(frozen=True, slots=True)
class _Sent:
    command: Command
    started: StartedCommand
    at: float


class ShardLink:
    """Owns one shard's connection. ``run`` never returns; what happens is posted as events.

    ``accept`` judges a shard before it may join: a reason to refuse it, or None.
    """

    def __init__(
        self,
        address: str,
        config: LinkConfig,
        *,
        post: Callable[[Event], None],
        accept: Callable[[str, codec.ShardInfo], str | None],
        observer: EngineObserver,
    ) -> None:
        self.address = address
        self._config = config
        self._post = post
        self._accept = accept
        self._observer = observer
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._last_step_end = 0.0
        # The client to ask for anything but commands; None while the shard is not leased.
        self.client: ShardClient | None = None

    def send(self, command: Command) -> None:
        """Carry out ``command`` after those before it; a running Decode yields to it."""
        self._commands.put_nowait(command)

    async def run(self) -> None:
        """Keep the shard leased for ever. Ends by cancellation only."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            joined_at = time.monotonic()
            try:
                await self._session()
            except* (ShardRpcError, _Stalled) as errors:
                level = logging.DEBUG if self.client is None else logging.WARNING
                reason = "; ".join(str(error) for error in errors.exceptions)
                _log.log(level, "shard is not available", extra={"shard": self.address, "reason": reason})
            finally:
                self._leave()
            if time.monotonic() - joined_at > _MAX_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            # Jitter: routers and links that lost the same host must not come back in step.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    def _leave(self) -> None:
        if self.client is not None:
            self.client = None
            self._commands = asyncio.Queue()
            self._observer.shard_gone(self.address)
            self._post(ShardLost(self.address))

    async def _session(self) -> None:
        """One lease of the shard, from connecting to its end. Raises a group of ShardRpcError and _Stalled."""
        client = ShardClient(self.address, self._config.step_timeout_s)
        try:
            async with asyncio.TaskGroup() as tasks:
                info = await client.info()
                refusal = self._accept(self.address, info)
                if refusal is not None:
                    _log.error("shard refused", extra={"shard": self.address, "reason": refusal})
                    raise ShardRpcError(None, refusal)
                epoch = info.epoch + 1
                await client.lease(self._config.router_id, epoch, self._ttl_ms)
                self.client = client
                self._post(ShardJoined(self.address, info.limits))
                _log.info("shard joined", extra={"shard": self.address, "epoch": epoch, "cells": info.limits.cells})
                tasks.create_task(self._heartbeat(client, epoch))
                tasks.create_task(self._carry_out(client, epoch))
        finally:
            await client.close()

    @property
    def _ttl_ms(self) -> int:
        return int(self._config.lease_ttl_s * 1000)

    async def _heartbeat(self, client: ShardClient, epoch: int) -> None:
        """Renew the lease, and notice passes that stand still though the shard answers."""
        last_steps, moved_at, draining = -1, time.monotonic(), False
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            state = await client.lease(self._config.router_id, epoch, self._ttl_ms)
            if state.draining and not draining:
                draining = True
                self._post(ShardDraining(self.address))
            if state.steps != last_steps or not state.busy:
                last_steps, moved_at = state.steps, time.monotonic()
            elif time.monotonic() - moved_at > self._config.step_timeout_s:
                raise _Stalled(f"no pass completed for {self._config.step_timeout_s:g} s")

    async def _carry_out(self, client: ShardClient, epoch: int) -> None:
        """Commands in order. The next is sent while a Decode runs, so that the shard turns to it without a pause."""
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
                current = await successor
            finally:
                successor.cancel()
                # Retrieved, so that a failure of both is reported once.
                await asyncio.gather(successor, return_exceptions=True)

    async def _collect(self, sent: _Sent) -> None:
        command = sent.command
        method = Method.DECODE if isinstance(command, Decode) else Method.PREFILL
        # A shard that had nothing to do was not held up.
        self._last_step_end = max(self._last_step_end, sent.at)
        async for reply in sent.started.replies():
            if isinstance(reply, codec.SwapReply):
                self._post(self._swapped(command, reply))
                continue
            self._report(method, reply)
            self._post(
                Stepped(
                    shard=self.address,
                    command_id=command.command_id,
                    outcome=reply.outcome,
                    tokens=reply.tokens,
                    seconds=reply.total_s,
                    prompt_logprobs=reply.prompt_logprobs,
                )
            )
        if isinstance(command, FilterBatch):
            self._observer.filtered(time.monotonic() - sent.at)
        self._post(CommandEnded(self.address, command.command_id))

    def _swapped(self, command: Command, reply: codec.SwapReply) -> Event:
        self._observer.swap_space(self.address, reply.used_bytes)
        if isinstance(command, SwapOut):
            return SwappedOut(
                shard=self.address,
                command_id=command.command_id,
                saved=reply.done,
                seconds=reply.seconds,
            )
        assert isinstance(command, SwapIn), f"{command} is no swap"
        return SwappedIn(
            shard=self.address,
            command_id=command.command_id,
            restored=reply.done,
            seconds=reply.seconds,
        )

    def _report(self, method: Method, reply: codec.StepReply) -> None:
        if reply.outcome is not StepOutcome.OK:
            self._observer.step_failed(method)
            return
        now = time.monotonic()
        elapsed, self._last_step_end = now - self._last_step_end, now
        self._observer.step(
            StepReport(
                shard=self.address,
                method=method,
                sequences=len(reply.tokens),
                forward_s=reply.forward_s,
                sample_s=reply.sample_s,
                total_s=reply.total_s,
                overhead_s=max(0.0, elapsed - reply.forward_s),
            )
        )
