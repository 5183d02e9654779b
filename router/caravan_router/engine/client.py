"""One gRPC channel to one shard: typed calls with deadlines. Every failure is a ShardRpcError."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar, assert_never

import grpc
import grpc.aio

from caravan_proto.channel import client_options
from caravan_proto.errors import ShardError, parse_error
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_router.core.constraint import Constraint
from caravan_router.core.engine import TokenizedText
from caravan_router.engine import command_codec, info_codec, reply_codec
from caravan_router.engine.shard_info import ShardInfo, ShardStatus, ShardWish
from caravan_router.scheduling.actions import (
    Command,
    Decode,
    Evaluate,
    Fetch,
    FilterBatch,
    Load,
    Prefill,
    Save,
    SetLayout,
)
from caravan_router.scheduling.events import LayoutSet, Loaded, Saved, SavedRun, Stepped

_T = TypeVar("_T")

Reply = Stepped | Saved | Loaded | LayoutSet

_CONTROL_TIMEOUT_S = 5.0
# A transfer between two shards that is slower is given up.
_LEAST_BYTES_PER_S = 10e6
# A timer that is later than this means that this process did not run.
_LATE_S = 0.25
# Tokenizing the longest text that a shard accepts takes seconds.
_TOKENIZE_TIMEOUT_S = 30.0
_COMPILE_TIMEOUT_S = 30.0


class ShardRpcError(Exception):
    """A call failed: the shard refused it (``error`` is set), or the transport did not carry it."""

    def __init__(self, error: ShardError | None, message: str) -> None:
        super().__init__(message)
        self.error = error


async def _checked(call: Awaitable[_T], timeout_s: float) -> _T:
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise ShardRpcError(None, f"no answer within {timeout_s:g} s") from None
    except grpc.aio.AioRpcError as rpc_error:
        raise _shard_error(rpc_error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Not this task was cancelled but the call, since the channel was closed.
        raise _closed() from None


def _closed() -> ShardRpcError:
    return ShardRpcError(None, "the connection was closed")


async def _heard(read: Coroutine[None, None, _T], silence_s: float) -> _T:
    """Await ``read`` for ``silence_s``, and again if this process itself did not run in time to read what arrived."""
    reading = asyncio.ensure_future(read)
    try:
        while True:
            began = time.monotonic()
            await asyncio.wait({reading}, timeout=silence_s)
            if reading.done():
                return reading.result()
            if time.monotonic() - began < silence_s + _LATE_S:
                raise ShardRpcError(None, f"it has reported nothing for {silence_s:g} s")
    except grpc.aio.AioRpcError as rpc_error:
        raise _shard_error(rpc_error) from None
    finally:
        reading.cancel()


def _shard_error(rpc_error: grpc.aio.AioRpcError) -> ShardRpcError:
    error, sentence = parse_error(rpc_error.details())
    return ShardRpcError(error, f"{rpc_error.code().name}: {sentence}")


class ShardClient:
    """Calls to the shard at ``address`` (``unix:/path`` or ``host:port``). ``step_timeout_s`` bounds one step.

    ``stream_interval_ms``: see `LinkConfig`. ``channel``: by default one in plaintext.
    """

    def __init__(
        self, address: str, step_timeout_s: float, stream_interval_ms: int = 0, channel: grpc.aio.Channel | None = None
    ) -> None:
        self._stream_interval_ms = stream_interval_ms
        self._address = address
        self._channel = channel or grpc.aio.insecure_channel(address, options=client_options())
        self._calls: shard_pb2_grpc.ShardServiceAsyncStub = shard_pb2_grpc.ShardServiceStub(self._channel)
        self._is_closed = False
        self._step_timeout_s = step_timeout_s
        # Number of texts that are being embedded.
        self.embedding = 0

    @property
    def _stub(self) -> "shard_pb2_grpc.ShardServiceAsyncStub":
        """Raises ShardRpcError once the client is closed, where gRPC would raise an error of its own."""
        if self._is_closed:
            raise _closed()
        return self._calls

    async def close(self) -> None:
        """End the channel and every call on it, with ShardRpcError."""
        self._is_closed = True
        await self._channel.close()

    async def info(self) -> ShardInfo:
        """Return identity and limits; wait for the connection as long as the deadline allows."""
        return info_codec.shard_info(await _checked(self._stub.Info(shard_pb2.InfoRequest()), _CONTROL_TIMEOUT_S))

    async def lease(self, router_id: str, epoch: int, ttl_s: float, wish: ShardWish | None = None) -> None:
        """Take the shard with a new epoch, or keep it with the same one.

        With a ``wish``, do not take it from another router, which learns of it.
        """
        request = shard_pb2.LeaseRequest(
            router_id=router_id,
            epoch=epoch,
            ttl_ms=int(ttl_s * 1000),
            if_free=wish is not None,
            held_shards=0 if wish is None else wish.held,
            urgent=wish is not None and wish.urgent,
        )
        await _checked(self._stub.Lease(request), _CONTROL_TIMEOUT_S)

    async def give_back(self, router_id: str, epoch: int) -> None:
        """End the lease; a shard that drains ends."""
        request = shard_pb2.LeaseRequest(router_id=router_id, epoch=epoch, release=True)
        await _checked(self._stub.Lease(request), _CONTROL_TIMEOUT_S)

    async def drain(self, epoch: int) -> None:
        """Let the shard drain, and end when its lease is given back."""
        await _checked(self._stub.Drain(shard_pb2.DrainRequest(epoch=epoch)), _CONTROL_TIMEOUT_S)

    async def fetch_runs(
        self, fetch: Fetch, epoch: int, source_epoch: int, source_hostname: str = ""
    ) -> tuple[bool, ...]:
        """Let the shard copy runs of another shard, whose certificate has ``source_hostname``, by default its host.

        Return for each run whether it is there now.
        """
        request = shard_pb2.FetchRunsRequest(
            epoch=epoch,
            source_address=fetch.source,
            source_epoch=source_epoch,
            keys=fetch.keys,
            source_hostname=source_hostname,
        )
        timeout_s = _CONTROL_TIMEOUT_S + fetch.size_bytes / _LEAST_BYTES_PER_S
        return tuple((await _checked(self._stub.FetchRuns(request), timeout_s)).fetched)

    async def saved_runs(self) -> tuple[SavedRun, ...]:
        """Return the runs that the shard has saved."""
        call = self._stub.ListRuns(shard_pb2.ListRunsRequest())
        runs: list[SavedRun] = []
        while isinstance(message := await _checked(call.read(), _CONTROL_TIMEOUT_S), shard_pb2.ListRunsResponse):
            runs += info_codec.saved_runs(message)
        return tuple(runs)

    async def watch(self, interval_s: float, silence_s: float, epoch: int = 0) -> AsyncGenerator[ShardStatus, None]:
        """Yield the shard's status when it starts to drain and at least every ``interval_s``; end when it ends.

        ``epoch``: of the lease that soon ends when this stream breaks off; 0 for none.

        Raises ShardRpcError after ``silence_s`` without a status.
        """
        call = self._stub.Watch(shard_pb2.WatchRequest(interval_ms=int(interval_s * 1000), epoch=epoch))
        while isinstance(message := await _heard(call.read(), silence_s), shard_pb2.WatchResponse):
            yield info_codec.shard_status(message)

    async def start(self, command: Command, epoch: int) -> AsyncIterator[Sequence[Reply]]:
        """Send ``command`` and return its replies, one for each step, or one; those of a message together.

        What is started later runs later.
        """
        stub = self._stub
        match command:
            case Decode():
                steps = stub.Decode(command_codec.decode_request(command, epoch, self._stream_interval_ms))
                await _checked(steps.initial_metadata(), self._step_timeout_s)
                return self._step_replies(command, steps)
            case Prefill():
                return self._reply(
                    command, stub.Prefill(command_codec.prefill_request(command, epoch)), reply_codec.stepped
                )
            case Evaluate():
                return self._reply(
                    command, stub.Evaluate(command_codec.evaluate_request(command, epoch)), reply_codec.evaluated
                )
            case Save():
                return self._reply(command, stub.Save(command_codec.save_request(command, epoch)), reply_codec.saved)
            case Load():
                return self._reply(command, stub.Load(command_codec.load_request(command, epoch)), reply_codec.loaded)
            case SetLayout():
                return self._reply(
                    command, stub.SetLayout(command_codec.set_layout_request(command, epoch)), reply_codec.layout_set
                )
            case FilterBatch():
                return self._reply(command, stub.FilterBatch(command_codec.filter_batch_request(command, epoch)), None)
            case _:
                assert_never(command)

    async def _reply(
        self, command: Command, call: Awaitable[_T], decode: Callable[[str, int, _T], Reply] | None
    ) -> AsyncIterator[Sequence[Reply]]:
        message = await _checked(call, self._step_timeout_s)
        if decode is not None:
            yield (decode(self._address, command.command_id, message),)

    async def _step_replies(
        self, command: Decode, call: grpc.aio.UnaryStreamCall[shard_pb2.DecodeRequest, shard_pb2.DecodeResponse]
    ) -> AsyncIterator[Sequence[Reply]]:
        # Without a deadline, which would cost a timer per step: the link watches whether steps complete.
        try:
            while isinstance(message := await call.read(), shard_pb2.DecodeResponse):
                yield [reply_codec.stepped(self._address, command.command_id, step) for step in message.steps]
        except grpc.aio.AioRpcError as rpc_error:
            raise _shard_error(rpc_error) from None

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool = True) -> TokenizedText:
        """Return the tokens of ``text``; with ``parse_special``, the text of a control token becomes that token."""
        return await self._tokenize(
            shard_pb2.TokenizeRequest(text=text, add_special=add_special, parse_special=parse_special)
        )

    async def tokenize_pair(self, query: str, document: str) -> TokenizedText:
        """Return the tokens of a pair as a model that ranks reads it."""
        return await self._tokenize(shard_pb2.TokenizeRequest(text=query, document=document))

    async def _tokenize(self, request: shard_pb2.TokenizeRequest) -> TokenizedText:
        message = await _checked(self._stub.Tokenize(request), _TOKENIZE_TIMEOUT_S)
        return TokenizedText(tuple(message.token_ids), tuple(message.pieces), tuple(message.specials))

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        """Return the pieces of ``token_ids``."""
        request = shard_pb2.DetokenizeRequest(token_ids=token_ids)
        message = await _checked(self._stub.Detokenize(request), _TOKENIZE_TIMEOUT_S)
        return TokenizedText(tuple(token_ids), tuple(message.pieces), tuple(message.specials))

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        """Compile ``constraint``; return what is wrong with it, or None."""
        request = shard_pb2.CompileConstraintRequest(constraint=command_codec.constraint_message(constraint))
        message = await _checked(self._stub.CompileConstraint(request), _COMPILE_TIMEOUT_S)
        return message.problem or None

    async def embed(self, text: Sequence[int]) -> tuple[float, ...]:
        """Return the vector of a text's tokens."""
        request = shard_pb2.EmbedRequest(token_ids=text, counts=[len(text)])
        self.embedding += 1
        try:
            return tuple((await _checked(self._stub.Embed(request), self._step_timeout_s)).values)
        finally:
            self.embedding -= 1
