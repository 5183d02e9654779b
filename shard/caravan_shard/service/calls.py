"""Answers the calls of routers, whether gRPC brings them or a caller in this process. A refused call is a value."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Command, Load, Prefill
from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.model import Info, ShardClaim, ShardStatus
from caravan_shard.checks.preview import check_keys
from caravan_shard.checks.tokens import split_texts
from caravan_shard.constraints.compiler import CheckUnavailableError, ConstraintCompiler
from caravan_shard.constraints.grammar import Grammar, Problem
from caravan_shard.engine.engine import Engine
from caravan_shard.engine.replies import Replies
from caravan_shard.engine.worker import Worker
from caravan_shard.protocol.commands import EmbedText, StoredRun, prepared
from caravan_shard.protocol.results import Embedded, Refusal, bad_request
from caravan_shard.sampling.processors import ProcessorRegistry
from caravan_shard.service.adapters import AdapterService
from caravan_shard.service.lease import ShardLease
from caravan_shard.service.media import MediaService
from caravan_shard.service.model_calls import ModelCalls
from caravan_shard.service.phase import Phase, PhaseSignal
from caravan_shard.service.run_exchange import RunExchange
from caravan_shard.service.text import TextService

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class CallHandler:
    """The parts of a started shard that answer calls. Runs on the event loop.

    ``info`` returns the reply to Info. ``ask_drain`` begins to drain the shard; None if no router may end it, since it
    is a part of a program. ``compiler``: None if the model only embeds.
    """

    info: Callable[[], Info]
    worker: Worker
    engine: Engine
    lease_of_shard: ShardLease
    phase: PhaseSignal
    text: TextService
    media: MediaService
    compiler: ConstraintCompiler | None
    exchange: RunExchange
    adapters: AdapterService
    model_calls: ModelCalls
    processors: ProcessorRegistry
    ask_drain: Callable[[], None] | None
    # Commands acquire it in the order in which they arrive.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def status(self) -> ShardStatus:
        """The shard's progress."""
        return ShardStatus(
            steps=self.engine.step_count,
            sequences=self.engine.sequence_count,
            busy=self.worker.is_busy,
            draining=self._is_draining,
            claim=self.lease_of_shard.claim,
            knows_contents=bool(self.engine.backend.contents.sha256),
        )

    @property
    def _is_draining(self) -> bool:
        return self.phase.current is not Phase.SERVING

    def lease(
        self, router_id: str, epoch: int, ttl_s: float, claim: ShardClaim | None, url: str = ""
    ) -> Refusal | None:
        """Take the shard or keep it; with a ``claim``, do not take it from another router. Return why not.

        ``url``: where other routers reach this one; empty if they cannot.
        """
        if self._is_draining and epoch > self.lease_of_shard.epoch:
            return Refusal(ShardError.DRAINING, "this shard is ending")
        refusal = None if claim is None else self.lease_of_shard.ask(router_id, claim)
        return refusal or self.lease_of_shard.request(router_id, epoch, ttl_s, url)

    def give_back(self, router_id: str, epoch: int) -> Refusal | None:
        """End the lease. Return why not, if refused."""
        return self.lease_of_shard.release(router_id, epoch)

    async def watch(self, interval_s: float, epoch: int) -> AsyncGenerator[ShardStatus, None]:
        """Yield the status at once, when the shard's phase changes and at least every ``interval_s``; end when it ends.

        ``epoch``: of the lease that soon ends when this breaks off; 0 for none.
        """
        is_whole = False
        try:
            while True:
                seen = self.phase.current
                yield self.status
                if seen is Phase.ENDED:
                    is_whole = True
                    return
                await self.phase.wait_for_change(seen, interval_s)
        finally:
            if epoch and not is_whole:
                self.lease_of_shard.note_broken(epoch)

    async def submit(self, command: Command, epoch: int) -> Replies | Refusal:
        """Queue a command of the router that holds the lease, after the commands that arrived before it."""
        async with self.turn:
            # A running Decode continues meanwhile. Commands that arrive later wait.
            match command:
                case Prefill():
                    ready = await self._prepared(command)
                    if isinstance(ready, Refusal):
                        return ready
                    command = ready
                case Load():
                    keys = [piece.key for entry in command.entries for piece in entry.slices]
                    if (refusal := await self.exchange.read_ahead(keys)) is not None:
                        return refusal
                case _:
                    pass
            # Nothing is awaited before the worker has the command, so that the order of commands is kept.
            return self.lease_of_shard.check(epoch) or self.worker.submit(command)

    async def _prepared(self, command: Prefill) -> Prefill | Refusal:
        if self.compiler is None:
            return _ONLY_EMBEDS
        setups = [chunk.setup for chunk in command.chunks if chunk.setup is not None]
        constraints = [one.constraint for one in setups if one.constraint is not None]
        grammars: dict[Constraint, Grammar] | Problem | Refusal = {}
        if constraints:
            grammars = await self._checked(self.compiler.compile_all(constraints))
        if isinstance(grammars, Problem):
            return bad_request(grammars.sentence)
        if isinstance(grammars, Refusal):
            return grammars
        return prepared(command, grammars, self.processors)

    def list_runs(self) -> list[tuple[StoredRun, bool]]:
        """Return the saved runs, each with whether it is on disk."""
        return self.engine.runs.list_runs()

    async def fetch_runs(
        self, address: str, hostname: str, source_epoch: int, keys: Sequence[bytes], epoch: int
    ) -> list[bool] | Refusal:
        """Copy runs of the shard at ``address``; return whether each is here. ``hostname``: see `open_channel`."""
        refusal = self.lease_of_shard.check(epoch) or self.model_calls.refusal
        refusal = refusal or (check_keys(keys) if address else bad_request("there is no source_address"))
        return refusal or await self.exchange.fetch(address, hostname, source_epoch, keys)

    def read_run(self, key: bytes, epoch: int) -> AsyncIterator[bytes] | Refusal:
        """Return the bytes of a saved run in parts, of which there are none if it is not here."""
        return self.lease_of_shard.check(epoch) or self.model_calls.refusal or self.exchange.send(key)

    def drain(self, epoch: int) -> Refusal | None:
        """Begin to drain the shard. Return why not, if refused."""
        refusal = self.lease_of_shard.check(epoch)
        if refusal is None and self.ask_drain is None:
            return Refusal(ShardError.BAD_REQUEST, "this shard ends with its program")
        if refusal is None and self.ask_drain is not None:
            self.ask_drain()
        return refusal

    async def compile_constraint(self, constraint: Constraint) -> Problem | Refusal | None:
        """Compile a constraint for the sequences to come, or return what is wrong with it."""
        if self.compiler is None:
            return _ONLY_EMBEDS
        outcome = await self._checked(self.compiler.compile(constraint))
        return None if isinstance(outcome, Grammar) else outcome

    async def _checked(self, compiling: Coroutine[Any, Any, T]) -> T | Refusal:
        """Return what the compiler returns, or that constraints cannot be checked now."""
        try:
            return await self.model_calls.unless_ending(compiling)
        except CheckUnavailableError as error:
            _log.error("a constraint could not be checked", extra={"error": str(error)})
            return Refusal(ShardError.CHECK_FAILED, "constraints cannot be checked at present")

    async def embed(self, token_ids: Sequence[int], counts: Sequence[int]) -> list[float] | Refusal:
        """Return the vectors of texts of ``counts`` tokens, one after another."""
        backend = self.engine.backend
        texts = split_texts(token_ids, counts, backend.capacity, backend.facts.vocabulary_size)
        if isinstance(texts, Refusal):
            return texts
        values: list[float] = []
        done = 0
        while done < len(texts):
            # A command for each text, of which the worker joins some. Beside sequences it takes them one at a time: the
            # texts of all calls take turns then.
            together = 1 if self.engine.unfinished_count else backend.capacity.joint_embed.texts
            sent = [self.worker.submit(EmbedText(text)) for text in texts[done : done + together]]
            try:
                for replies in sent:
                    (result,) = await replies.next() or (None,)
                    if not isinstance(result, Embedded):
                        assert isinstance(result, Refusal), f"{result} is no answer to this command"
                        return result
                    values += result.values.tolist()
            finally:
                for replies in sent:
                    replies.cancel()
            done += together
        return values


_ONLY_EMBEDS = bad_request("this model only embeds texts and generates none")
