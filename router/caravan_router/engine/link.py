"""One shard as the router sees it: connect, take the lease, carry out commands, notice the end, start over.

A shard obeys one router at a time, the one with the newest epoch. A router takes a shard that no other holds, with an
epoch one above the last. It asks for a shard that another router holds, and stands by: the holder hears of it, and may
let the shard go (`link_pool`). A router that ends gives its shards back; leases of one that dies end within seconds.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from caravan_proto.channel import is_tcp
from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Command
from caravan_proto.messages.model import ShardClaim
from caravan_router.engine.client import ShardClient
from caravan_router.engine.command_runner import CommandRunner, EventSink, Session, StepPace
from caravan_router.engine.link_config import LinkConfig, find_tls_problem
from caravan_router.engine.shard_calls import ShardCalls, ShardInfo, ShardRpcError
from caravan_router.engine.wall import log_bug
from caravan_scheduler.actions import Encode, Fetch
from caravan_scheduler.core.shards import ShardStanding, ShardState
from caravan_scheduler.events import (
    RunsFound,
    ShardDraining,
    ShardJoined,
    ShardLost,
)

# A router that lent a shard has asked for it again after so many seconds, and the borrower has heard of it.
_FIRST_ASKED_S = 3.0
_log = logging.getLogger(__name__)
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
# A shard that does not answer for so long is told of: it may be about to start, or its address may be wrong.
_UNREACHED_S = 5.0
# Part of a lease's time after which it is renewed.
_RENEWED_AFTER = 1 / 15
# A router that ends waits so long for a shard to take its lease back.
_LAST_CALL_S = 1.0
# A router asks this often for a shard that another one holds, in seconds: while its requests wait, and else.
_URGENT_S = 0.1
_STANDBY_S = 1.0
# A router that let a shard go for another router does not ask for it again for this many seconds, in which that one
# asks for it: one whose requests wait, and any other.
_TURN_PAUSE_S = 0.4
_YIELDED_S = 5.0
_GONE = "its address is gone"


class ShardTurns:
    """Of one shard, as its link knows.

    A router that lets its only shard go for requests that wait at another one lends it. It has it back for good when
    those have ended: what begins meanwhile is for the lender.
    """

    def __init__(self) -> None:
        # The claim of another router that wants the shard; None if there is none.
        self.wanted_by: ShardClaim | None = None
        # The shard drains because another router takes it over, which has requests that wait for it.
        # The seconds after that before it is asked for again; 0 if it is not to be taken over.
        self.yields_for_s = 0.0
        # The URL of the router that lent it, while it is borrowed; "" if it is not, or that one cannot be reached.
        self.lender = ""
        self.lent = False
        # The URL of the router that has just got back what it had lent, until the shard says who holds it.
        self.returned_to = ""
        self._taken_s = time.monotonic()

    @property
    def is_wanted_urgently(self) -> bool:
        """Whether requests of another router wait for the shard."""
        return self.wanted_by is not None and self.wanted_by.urgent

    @property
    def is_borrowed(self) -> bool:
        """Whether the shard goes back once what has begun here has ended.

        The lender asks for it all the time; if it does not, it is gone.
        """
        if not self.lender:
            return False
        return self.wanted_by is not None or time.monotonic() - self._taken_s < _FIRST_ASKED_S

    def take(self, holder_url: str, *, for_turn: bool) -> None:
        """Note that the shard is this router's now. ``for_turn``: requests waited for it that ``holder_url`` held."""
        # What was lent is not borrowed from the borrower.
        self.lender = holder_url if for_turn and not self.lent else ""
        self.lent = False
        self._taken_s = time.monotonic()

    def yield_for(self, seconds: float, *, lend: bool) -> None:
        """Note that the shard goes to another router; ``lend``: it is this router's only one."""
        self.yields_for_s = seconds
        # One that is borrowed is not lent, but given back.
        self.lent = lend and not self.lender

    def leave(self) -> None:
        """Note that the shard is no longer this router's."""
        self.returned_to = self.lender if self.yields_for_s else ""
        self.wanted_by, self.yields_for_s, self.lender = None, 0.0, ""


class SessionError(Exception):
    """Why a session with the shard ended or could not start, apart from a failed call."""


class RefusedError(SessionError):
    """The shard may not serve beside the others."""


class InsecureError(SessionError):
    """Router and shard do not agree on TLS, or one refuses the other's certificate."""


class DrainedError(SessionError):
    """The shard drained as planned, and has ended or is another router's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOwner:
    """``accept`` judges a shard before it joins: it returns the engine of its model, or a reason to refuse it.

    ``is_other`` says whether what is known now of the shard's files tells it from the other shards of its engine.
    ``claim`` returns what to ask a shard with the model of that fingerprint with; None if this router needs no more of
    them. ``on_wanted`` is called when `ShardTurns.wanted_by` has changed.
    """

    accept: "Callable[[ShardLink, ShardInfo], EventSink | str]"
    is_other: "Callable[[ShardLink, ShardInfo], bool]" = lambda _link, _info: False
    claim: Callable[[str], ShardClaim | None] = lambda _fingerprint: ShardClaim(0)
    on_wanted: Callable[[], None] = lambda: None

    def engine_of(self, link: "ShardLink", info: ShardInfo) -> EventSink:
        """Return the engine of the shard's model. Raises RefusedError."""
        accepted = self.accept(link, info)
        if isinstance(accepted, str):
            raise RefusedError(accepted)
        return accepted

    def check_same(self, link: "ShardLink", info: ShardInfo) -> None:
        """Tell the engine of a leased shard what is in its files now. Raise SessionError if it is another's shard."""
        if self.is_other(link, info):
            raise SessionError("the file of its model has the name of another one, and other weights")
        self.engine_of(link, info)


class ShardLink:
    """Owns the connection to one shard and posts what happens there as events."""

    # Set when the shard is accepted, which comes before every event.
    _sink: EventSink

    def __init__(self, address: str, config: LinkConfig, owner: LinkOwner) -> None:
        self.address = address
        self._config = config
        self._owner = owner
        self.turns = ShardTurns()
        # None while the shard is not leased.
        self._runner: CommandRunner | None = None
        # Nothing of the shard, which drains, is needed any more.
        self._drained = asyncio.Event()
        self._pace = self._new_pace()
        # Incarnation of the shard and number of its steps when it last reported.
        self._reported: tuple[str, int] | None = None
        # Incarnation and epoch of the last lease this router held; None before the first.
        self.lease: tuple[str, int] | None = None
        self.retired = False
        # Makes calls other than commands; None while the shard is not leased.
        self.client: ShardCalls | None = None
        # The shard's last description of itself; None before it has answered.
        self.info: ShardInfo | None = None
        self.standing = ShardStanding(state=ShardState.JOINING, since_s=time.monotonic())
        # Why the shard could not be reached, as the log says since it was last leased.
        self._told: set[str] = set()

    @property
    def epoch(self) -> int:
        """The epoch of the last lease this router held; 0 before the first."""
        return 0 if self.lease is None else self.lease[1]

    def send(self, command: Command) -> None:
        """Queue ``command`` for the leased shard; a running Decode yields to it."""
        if self._runner is not None:
            self._runner.send(command)

    def run_beside(self, work: Fetch | Encode, source_epoch: int = 0) -> None:
        """Queue a transfer to the leased shard, or a medium for it to encode, beside its commands.

        ``source_epoch``: of the lease of the shard that is fetched from.
        """
        if self._runner is None:
            return
        if isinstance(work, Fetch):
            self._runner.fetch(work, source_epoch)
        else:
            self._runner.encode(work)

    def give_back(self) -> None:
        """End the lease of the shard, which has drained, or of which the scheduler knows no more what it does."""
        self._drained.set()

    async def drain(self) -> bool:
        """Ask the shard to drain and end; return whether it is leased and has agreed."""
        if self.client is None:
            return False
        try:
            await self.client.drain(self.epoch)
        except ShardRpcError:
            return False
        return True

    def yield_shard(self, *, lend: bool) -> None:
        """Drain the shard and give it back, for another router; ``lend``: it is this router's only one, for a turn."""
        self.turns.yield_for(_TURN_PAUSE_S if self.turns.is_wanted_urgently else _YIELDED_S, lend=lend)
        self._drain("another router takes it over")

    def retire(self) -> None:
        """Drain the shard, whose address is gone: `run` returns when its session has ended."""
        if not self.retired:
            self.retired = True
            if self.standing.state is ShardState.SERVING:
                self._drain(_GONE)

    async def run(self) -> None:
        """Keep the shard leased, or wait for it, until cancelled or retired.

        A session that fails while it is cancelled raises its failure only, so cancel a retired link.
        """
        backoff_s = _FIRST_BACKOFF_S
        while not self.retired:
            joined_at = time.monotonic()
            try:
                await self._session()
            except* (ShardRpcError, SessionError) as errors:
                self._note_end(errors.exceptions)
            except* Exception as errors:  # noqa: BLE001  whatever a bug raises
                log_bug("a session with a shard has met a bug and begins again", shard=self.address)
                self._note_end(errors.exceptions)
            finally:
                yielded_for_s = self.turns.yields_for_s
                self._leave()
            if self.retired:
                return
            if yielded_for_s:
                backoff_s = yielded_for_s
            elif time.monotonic() - joined_at > _MAX_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            # Jitter: routers and links that lost the same host must not come back at the same moment.
            pause_s = backoff_s * random.uniform(0.5, 1.0)  # noqa: S311
            self.standing = replace(self.standing, next_try_s=time.monotonic() + pause_s)
            await asyncio.sleep(pause_s)
            self.standing = replace(self.standing, next_try_s=None)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    def _note_end(self, errors: Sequence[Exception]) -> None:
        """Log why a session ended or could not start, and note it for operators."""
        reason = "; ".join(str(error) for error in errors)
        # Once: the shard is asked again and again.
        level_of_refusal = logging.DEBUG if reason == self.standing.reason else logging.ERROR
        if any(isinstance(error, RefusedError) for error in errors):
            _log.log(level_of_refusal, "shard refused", extra={"shard": self.address, "reason": reason})
            self._become(ShardState.REFUSED, reason)
            return
        told, level = "shard is not available", logging.WARNING
        if any(isinstance(error, DrainedError) for error in errors):
            level = logging.INFO
        elif any(isinstance(error, InsecureError) for error in errors):
            level = level_of_refusal
        elif self.client is not None:
            self._sink.observer.shard_lost()
        else:
            told, level = "shard cannot be reached", self._level_of_silence(reason)
        _log.log(level, told, extra={"shard": self.address, "reason": reason})
        self._become(ShardState.JOINING if self.lease is None else ShardState.LOST, reason)

    def _level_of_silence(self, reason: str) -> int:
        """Return at which level the log says that the shard does not answer: once for each reason as a warning."""
        if reason in self._told or time.monotonic() - self.standing.since_s < _UNREACHED_S:
            return logging.DEBUG
        self._told.add(reason)
        return logging.WARNING

    def _become(self, state: ShardState, reason: str = "") -> None:
        since_s = self.standing.since_s if state is self.standing.state else time.monotonic()
        self.standing = ShardStanding(state=state, since_s=since_s, reason=reason)

    def _drain(self, reason: str) -> None:
        self._become(ShardState.DRAINING, reason)
        self._sink.post(ShardDraining(self.address))

    def _leave(self) -> None:
        self.turns.leave()
        if self.client is not None:
            self.client = None
            self._runner = None
            self._drained.clear()
            self._sink.observer.shard_gone(self.address)
            self._sink.post(ShardLost(self.address))

    def _new_pace(self) -> StepPace:
        # Progress is seen once per heartbeat, so half of one less is noticed as soon as silence.
        shortest_s = self._config.silence_s - self._config.heartbeat_s / 2
        return StepPace(shortest_s, self._config.step_timeout_s)

    async def _session(self) -> None:
        """Hold the shard from connecting to its end. Raise ShardRpcError or SessionError, or a group of them."""
        client = await self._make_client()
        try:
            self.info = info = await self._ask(client)
            if self._reported is not None:
                await self._check_moved(client, info)
            survived = self.lease is not None and self.lease[0] == info.incarnation
            epoch = await self._take(client, info)
            self.client = client
            self._told.clear()
            runs = await client.saved_runs()
            # The engine may have been replaced meanwhile, when no shard of it was left.
            self._sink = self._owner.engine_of(self, info)
            await self._sink.adapters.bring(client, epoch)
            hostname = "" if self._config.tls is None else self._config.tls.hostname
            session = Session(address=self.address, client=client, epoch=epoch, sink=self._sink, hostname=hostname)
            self._runner = runner = CommandRunner(session, self._pace)
            self._sink.post(ShardJoined(self.address, info.limits, runs, survived))
            self._become(ShardState.SERVING)
            if self.retired:
                self._drain(_GONE)
            cells = info.limits.layout.cells
            _log.info(
                "shard joined", extra={"shard": self.address, "epoch": epoch, "cells": cells, "saved_runs": len(runs)}
            )
            if self._config.wants_drafts and not info.limits.draft_tokens:
                _log.warning(
                    "requests have no draft tokens on this shard: the memory of its sequences cannot be cut back",
                    extra={"shard": self.address, "model": info.facts.name},
                )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew(client, epoch))
                tasks.create_task(self._watch(client, info, runner))
                tasks.create_task(runner.run_commands())
                tasks.create_task(runner.run_fetches())
                tasks.create_task(runner.run_encodings())
                tasks.create_task(self._give_back(client, epoch))
        except asyncio.CancelledError:
            # This router ends. Neither the next one nor a shard that drains has to wait until the lease expires.
            if self.client is not None:
                with contextlib.suppress(ShardRpcError, TimeoutError):
                    async with asyncio.timeout(_LAST_CALL_S):
                        await client.give_back(self._config.router_id, self.epoch)
            raise
        finally:
            await client.close()

    async def _make_client(self) -> ShardCalls:
        config = self._config
        if config.connect is not None:
            return config.connect(self.address)
        channel = None if config.tls is None else await config.tls.open_channel(self.address)
        return ShardClient(self.address, config.step_timeout_s, config.stream_interval_ms, channel)

    async def _ask(self, client: ShardCalls) -> ShardInfo:
        """Ask the shard what it is. Raises ShardRpcError, or InsecureError if TLS is why it cannot be asked."""
        try:
            return await client.info()
        except ShardRpcError as error:
            if error.error is None and is_tcp(self.address):
                problem = await find_tls_problem(self.address, self._config.tls)
                if problem is not None:
                    raise InsecureError(problem) from None
            raise

    async def _check_moved(self, client: ShardCalls, info: ShardInfo) -> None:
        """Raise SessionError while the shard is still in the step in which it was lost: the step may hang."""
        async with contextlib.aclosing(client.watch(self._config.heartbeat_s, self._config.silence_s)) as statuses:
            async for status in statuses:
                if status.busy and self._reported == (info.incarnation, status.steps):
                    raise SessionError("it has not completed the step in which it was lost")
                return

    async def _take(self, client: ShardCalls, info: ShardInfo) -> int:
        """Take the lease and return its epoch."""
        holder = ""
        while not await self._ask_for(client, info):
            holder = info.holder_url
            await self._stand_by(info.facts.fingerprint)
            self.info = info = await client.info()
        claim = self._owner.claim(info.facts.fingerprint)
        self.turns.take(holder, for_turn=claim is not None and claim.urgent)
        if self.lease is not None and info.incarnation != self.lease[0]:
            self._pace = self._new_pace()
        self.lease = (info.incarnation, info.epoch + 1)
        return self.epoch

    async def _stand_by(self, fingerprint: str) -> None:
        """Wait before the shard is asked for again, no longer than until requests wait for it."""
        asks_at = time.monotonic() + _STANDBY_S * random.uniform(0.5, 1.0)  # noqa: S311  as in `run`
        await asyncio.sleep(_URGENT_S)
        while time.monotonic() < asks_at:
            claim = self._owner.claim(fingerprint)
            if claim is not None and claim.urgent:
                return
            await asyncio.sleep(_URGENT_S)

    async def _ask_for(self, client: ShardCalls, info: ShardInfo) -> bool:
        """Take the shard under its next epoch if no other router holds it; return whether it is this router's now."""
        claim = self._owner.claim(info.facts.fingerprint)
        if claim is None:
            self._become(ShardState.STANDBY, "this router ends, and does not need it")
            return False
        self._sink = self._owner.engine_of(self, info)
        try:
            await client.lease(
                self._config.router_id, info.epoch + 1, self._config.lease_ttl_s, claim, self._config.url
            )
        except ShardRpcError as error:
            if error.error is not ShardError.HELD:
                raise
            self._become(ShardState.STANDBY, "another router holds it")
            return False
        return True

    async def _renew(self, client: ShardCalls, epoch: int) -> None:
        while True:
            await asyncio.sleep(self._config.lease_ttl_s * _RENEWED_AFTER)
            await client.lease(self._config.router_id, epoch, self._config.lease_ttl_s, url=self._config.url)

    async def _give_back(self, client: ShardCalls, epoch: int) -> None:
        """Wait until the shard has drained, and end the session with its lease."""
        await self._drained.wait()
        await client.give_back(self._config.router_id, epoch)
        raise DrainedError("it has drained")

    async def _watch(self, client: ShardCalls, info: ShardInfo, runner: CommandRunner) -> None:
        """Note that the shard drains. Raise once it ends, reports nothing, or completes no step for too long."""
        heartbeat_s = self._config.heartbeat_s
        last_steps, still_s, heard_at, draining = -1, 0.0, time.monotonic(), False
        async with contextlib.aclosing(client.watch(heartbeat_s, self._config.silence_s, self.epoch)) as statuses:
            async for status in statuses:
                if status.claim != self.turns.wanted_by:
                    self.turns.wanted_by = status.claim
                    self._owner.on_wanted()
                if status.knows_contents and self.info is not None and not self.info.facts.sha256:
                    learned = await client.info()
                    self._owner.check_same(self, learned)
                    self.info = learned
                    runs = await client.saved_runs()
                    self._sink.post(RunsFound(self.address, learned.limits.run_fingerprint, runs))
                if status.draining and not draining:
                    draining = True
                    self._drain("the shard is ending")
                # At most two heartbeats: in a longer time, it was this process that did not run.
                since_s, heard_at = min(time.monotonic() - heard_at, 2 * heartbeat_s), time.monotonic()
                stands_still = status.busy and status.steps == last_steps
                still_s = still_s + since_s if stands_still else 0.0
                last_steps = status.steps
                self._reported = (info.incarnation, status.steps)
                if still_s > (runner.longest_step_s(heard_at - still_s) or self._config.step_timeout_s):
                    raise SessionError(f"no step completed for {still_s:.1f} s")
        # The last replies may still be on their way.
        await runner.finish()
        raise DrainedError("the shard ended") if draining else SessionError("the shard ended")
