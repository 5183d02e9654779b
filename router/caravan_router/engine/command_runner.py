"""Carries out the commands and transfers of one session with a shard, and posts their results."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Command, Decode, Evaluate, FilterBatch, Load, Prefill, Save, SetLayout
from caravan_proto.messages.results import StepOutcome
from caravan_router.engine.observer import EngineObserver, Method
from caravan_router.engine.shard_calls import Reply, ShardCalls, ShardRpcError
from caravan_scheduler.actions import Encode, Fetch
from caravan_scheduler.events import CommandEnded, Encoded, EncodeOutcome, Event, Fetched, Stepped

# A limit needs this many steps to go by. The first ones also read the model from disk.
_ENOUGH_STEPS = 16
_REMEMBERED_STEPS = 64
# Steps vary: other programs take processors, contexts grow.
_TIMES_SLOWER = 4.0
# After this time without a step, the system may have to read the model from disk again.
_COLD_AFTER_S = 30.0
_log = logging.getLogger(__name__)


class StepPace:
    """The last steps of one shard. No step counts as hung before ``shortest_s``, and every one after ``longest_s``."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self._steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_STEPS)
        self._last_at = 0.0

    def note(self, tokens: int, seconds: float, now: float) -> None:
        """Note a step over ``tokens`` tokens that took ``seconds`` and has just ended."""
        self._steps.append((tokens, seconds))
        self._last_at = now

    def limit_s(self, tokens: int, began: float) -> float:
        """Return the time after which a step over ``tokens`` tokens that ``began`` then counts as hung.

        That is four times what it would take if it were as slow as the slowest of the last steps, in proportion to its
        tokens where it has more.
        """
        if len(self._steps) < _ENOUGH_STEPS or began - self._last_at > _COLD_AFTER_S:
            return self._longest_s
        slowest_s = max(seconds * max(1.0, tokens / noted) for noted, seconds in self._steps)
        return min(self._longest_s, max(self._shortest_s, _TIMES_SLOWER * slowest_s))


class Adapters(Protocol):
    """What the shards of a model have loaded while they ran."""

    async def bring(self, client: ShardCalls, epoch: int) -> None:
        """Load on a shard that joins what the others have. Raises RefusedError, ShardRpcError."""
        ...


class EventSink(Protocol):
    """What a shard works for: the engine of its model, which gets its events."""

    @property
    def observer(self) -> EngineObserver: ...

    def post(self, event: Event) -> None: ...

    @property
    def adapters(self) -> Adapters: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A shard while the router holds its lease of ``epoch``. ``hostname``: see `ShardTls`."""

    address: str
    client: ShardCalls
    epoch: int
    sink: EventSink
    hostname: str


@dataclass(frozen=True, slots=True)
class _Sent:
    command: Command
    replies: AsyncIterator[Sequence[Reply]]
    at: float


class CommandRunner:
    """Sends what is queued, in order; notes in ``pace`` what steps take."""

    def __init__(self, session: Session, pace: StepPace) -> None:
        self._session = session
        self._pace = pace
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        # Transfers to the shard, each with the epoch of the other shard's lease.
        self._fetches: asyncio.Queue[tuple[Fetch, int]] = asyncio.Queue()
        self._encodings: asyncio.Queue[Encode] = asyncio.Queue()
        # Commands that the shard has and has not ended.
        self._under_way: deque[Command] = deque()
        self._last_step_end = 0.0

    def send(self, command: Command) -> None:
        """Queue ``command``; a running Decode yields to it."""
        self._commands.put_nowait(command)

    def fetch(self, fetch: Fetch, source_epoch: int) -> None:
        """Queue a transfer to this shard, beside its commands. ``source_epoch``: of the other shard's lease."""
        self._fetches.put_nowait((fetch, source_epoch))

    def encode(self, encode: Encode) -> None:
        """Queue a medium, which the shard encodes beside its commands."""
        self._encodings.put_nowait(encode)

    async def finish(self) -> None:
        """Wait until every command has ended."""
        await self._commands.join()

    def longest_step_s(self, began: float) -> float | None:
        """Return how long the shard may take for the step that ``began`` then; None if what it does is no step."""
        if self._session.client.embedding.texts or not all(
            isinstance(one, Prefill | Decode | Evaluate) for one in self._under_way
        ):
            # Texts are embedded between steps; commands that copy cells are no steps.
            return None
        return self._pace.limit_s(max(map(_tokens, self._under_way), default=0), began)

    async def run_fetches(self) -> None:
        """Carry out transfers one after another, as the shard does, until cancelled."""
        session = self._session
        while True:
            fetch, source_epoch = await self._fetches.get()
            began = time.monotonic()
            try:
                fetched = await session.client.fetch_runs(fetch, session.epoch, source_epoch, session.hostname)
            except ShardRpcError as error:
                _log.warning("a transfer failed", extra={"shard": session.address, "reason": str(error)})
                fetched = (False,) * len(fetch.keys)
            session.sink.observer.fetched(fetch.size_bytes, complete=all(fetched))
            seconds = time.monotonic() - began
            session.sink.post(Fetched(transfer_id=fetch.transfer_id, fetched=fetched, seconds=seconds))

    async def run_encodings(self) -> None:
        """Have media encoded one after another, so that only one is on its way, until cancelled."""
        session = self._session
        while True:
            encode = await self._encodings.get()
            outcome, seconds = EncodeOutcome.DONE, 0.0
            try:
                seconds = (await session.client.encode_media(encode.media)).seconds
            except ShardRpcError as error:
                # A shard that ends refuses all media, which others may encode.
                passes = error.error in (None, ShardError.DRAINING)
                outcome = EncodeOutcome.FAILED if passes else EncodeOutcome.REFUSED
                _log.warning(
                    "an image or audio clip was not encoded", extra={"shard": session.address, "reason": str(error)}
                )
            session.sink.observer.encoded(seconds, done=outcome is EncodeOutcome.DONE)
            session.sink.post(Encoded(encode_id=encode.encode_id, outcome=outcome, seconds=seconds))

    async def run_commands(self) -> None:
        """Send commands in order, until cancelled; the next while the last one runs, so that the shard need not wait.

        Raises ShardRpcError.
        """
        commands, session = self._commands, self._session

        async def start_next() -> _Sent:
            command = await commands.get()
            self._under_way.append(command)
            sent_at = time.monotonic()
            return _Sent(command, await session.client.start(command, session.epoch), sent_at)

        current = await start_next()
        while True:
            successor = asyncio.create_task(start_next())
            try:
                await self._collect(current)
                commands.task_done()
                self._under_way.popleft()
                current = await successor
            finally:
                successor.cancel()
                # Retrieve its result, so that a failure of both is reported once.
                await asyncio.gather(successor, return_exceptions=True)

    async def _collect(self, sent: _Sent) -> None:
        """Post the replies to a command and its end."""
        sink = self._session.sink
        # Time in which the shard had no command is not overhead.
        self._last_step_end = max(self._last_step_end, sent.at)
        async for replies in sent.replies:
            self._observe(sent.command, replies)
            for reply in replies:
                sink.post(reply)
        if isinstance(sent.command, FilterBatch):
            sink.observer.filtered(time.monotonic() - sent.at)
        sink.post(CommandEnded(self._session.address, sent.command.command_id))

    def _observe(self, command: Command, replies: Sequence[Reply]) -> None:
        steps = [reply for reply in replies if isinstance(reply, Stepped)]
        if not steps:
            return
        method = Method.PREFILL if isinstance(command, Prefill) else Method.DECODE
        tokens = max(1, _tokens(command))
        now = time.monotonic()
        elapsed, self._last_step_end = now - self._last_step_end, now
        overhead_s = max(0.0, elapsed - sum(step.forward_s for step in steps)) / len(steps)
        observer = self._session.sink.observer
        for step in steps:
            if step.outcome is StepOutcome.OK:
                observer.step(step, method, overhead_s=overhead_s)
                self._pace.note(tokens, step.seconds, now)
            else:
                observer.step_failed(method)


def _tokens(command: Command) -> int:
    """Return the number of tokens that each step of ``command`` has at most; 0 if it is no step."""
    match command:
        case Prefill():
            return sum(len(chunk.token_ids) for chunk in command.chunks) + len(command.ride)
        case Decode():
            return len(command.sequence_ids) + command.max_draft_tokens
        case Evaluate():
            return sum(len(row.token_ids) for row in command.rows)
        case FilterBatch() | Save() | Load() | SetLayout():
            return 0
        case _:
            assert_never(command)
