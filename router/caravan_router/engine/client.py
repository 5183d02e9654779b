"""One gRPC channel to one shard: typed calls with deadlines, and every failure as ShardRpcError."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from caravan_proto.channel import client_options
from caravan_proto.errors import ShardError, parse_error
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_router.core.constraint import Constraint
from caravan_router.core.engine import TokenizedText
from caravan_router.engine import codec
from caravan_router.engine.fleet import ShardInfo
from caravan_router.scheduling.actions import Command, Decode, FilterBatch, Prefill, SwapIn, SwapOut

Reply = TypeVar("Reply", covariant=True)

_CONTROL_TIMEOUT_S = 5.0
# Tokenizing the longest text that is let through takes seconds.
_TOKENIZE_TIMEOUT_S = 30.0

_COMPILE_TIMEOUT_S = 30.0


class ShardRpcError(Exception):
    """A call failed: refused by the shard (``error`` is set) or not carried out by the transport."""

    def __init__(self, error: ShardError | None, message: str) -> None:
        super().__init__(message)
        self.error = error


CommandReply = codec.StepReply | codec.SwapReply


class StartedCommand(Protocol):
    """A command the shard has, or is about to have; ``replies`` yields one item per pass or swap and ends with it."""

    def replies(self) -> AsyncIterator[CommandReply]: ...


async def _checked(call: Awaitable[Reply], timeout_s: float) -> Reply:
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise ShardRpcError(None, f"no answer within {timeout_s:g} s") from None
    except grpc.aio.AioRpcError as rpc_error:
        raise _translated(rpc_error) from None


def _translated(rpc_error: grpc.aio.AioRpcError) -> ShardRpcError:
    error, sentence = parse_error(rpc_error.details())
    return ShardRpcError(error, f"{rpc_error.code().name}: {sentence}")


UnaryResponse = (
    shard_pb2.PrefillResponse | shard_pb2.FilterBatchResponse | shard_pb2.SwapOutResponse | shard_pb2.SwapInResponse
)


class _UnaryCommand:
    def __init__(self, call: Awaitable[UnaryResponse], timeout_s: float):
        self._call = call
        self._timeout_s = timeout_s

    async def replies(self) -> AsyncIterator[CommandReply]:
        message = await _checked(self._call, self._timeout_s)
        if isinstance(message, shard_pb2.PrefillResponse):
            yield codec.step_reply(message)
        elif isinstance(message, shard_pb2.SwapOutResponse | shard_pb2.SwapInResponse):
            yield codec.swap_reply(message)


class _DecodeCommand:
    def __init__(self, call: grpc.aio.UnaryStreamCall[shard_pb2.DecodeRequest, shard_pb2.DecodeResponse]) -> None:
        self._call = call

    async def replies(self) -> AsyncIterator[CommandReply]:
        # No deadline per message, which would cost a timer per step: the link's heartbeat watches the steps.
        try:
            while isinstance(message := await self._call.read(), shard_pb2.DecodeResponse):
                yield codec.step_reply(message)
        except grpc.aio.AioRpcError as rpc_error:
            raise _translated(rpc_error) from None


class ShardClient:
    """Calls to the shard at ``address`` (``unix:/path`` or ``host:port``). ``step_timeout_s`` bounds one pass."""

    def __init__(self, address: str, step_timeout_s: float) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=client_options())
        self._stub: shard_pb2_grpc.ShardServiceAsyncStub = shard_pb2_grpc.ShardServiceStub(self._channel)
        self._step_timeout_s = step_timeout_s

    async def close(self) -> None:
        """End the channel and every call on it."""
        await self._channel.close()

    async def info(self) -> ShardInfo:
        """Identity and limits; waits for the connection as long as the deadline allows."""
        return codec.shard_info(await _checked(self._stub.Info(shard_pb2.InfoRequest()), _CONTROL_TIMEOUT_S))

    async def lease(self, router_id: str, epoch: int, ttl_s: float) -> None:
        """Take the shard with a new epoch, or keep it with the same one."""
        request = shard_pb2.LeaseRequest(router_id=router_id, epoch=epoch, ttl_ms=int(ttl_s * 1000))
        await _checked(self._stub.Lease(request), _CONTROL_TIMEOUT_S)

    async def watch(self, interval_s: float) -> AsyncGenerator[codec.ShardStatus, None]:
        """Yield the shard's status when it starts to drain and at least every ``interval_s``; end when it ends."""
        call = self._stub.Watch(shard_pb2.WatchRequest(interval_ms=int(interval_s * 1000)))
        while isinstance(
            message := await _checked(call.read(), interval_s + _CONTROL_TIMEOUT_S), shard_pb2.WatchResponse
        ):
            yield codec.shard_status(message)

    async def start(self, command: Command, epoch: int) -> StartedCommand:
        """Send ``command``. When this returns, a command started later runs later."""
        call: Awaitable[UnaryResponse]
        match command:
            case Prefill():
                call = self._stub.Prefill(codec.prefill_request(command, epoch))
            case FilterBatch():
                call = self._stub.FilterBatch(codec.filter_batch_request(command, epoch))
            case SwapOut():
                call = self._stub.SwapOut(codec.swap_out_request(command, epoch))
            case SwapIn():
                call = self._stub.SwapIn(codec.swap_in_request(command, epoch))
            case Decode():
                return await self._start_decode(command, epoch)
        return _UnaryCommand(call, self._step_timeout_s)

    async def _start_decode(self, command: Decode, epoch: int) -> StartedCommand:
        call = self._stub.Decode(codec.decode_request(command, epoch))
        await _checked(call.initial_metadata(), self._step_timeout_s)
        return _DecodeCommand(call)

    async def tokenize(self, text: str, *, add_special: bool) -> TokenizedText:
        """Tokens of ``text``; the text of control tokens is read as those tokens, as TGI's tokenizers do."""
        request = shard_pb2.TokenizeRequest(text=text, add_special=add_special, parse_special=True)
        message = await _checked(self._stub.Tokenize(request), _TOKENIZE_TIMEOUT_S)
        return TokenizedText(tuple(message.token_ids), tuple(message.pieces), tuple(message.specials))

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        """The pieces of ``token_ids``."""
        request = shard_pb2.DetokenizeRequest(token_ids=token_ids)
        message = await _checked(self._stub.Detokenize(request), _TOKENIZE_TIMEOUT_S)
        return TokenizedText(tuple(token_ids), tuple(message.pieces), tuple(message.specials))

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        """What is wrong with it, or None."""
        request = shard_pb2.CompileConstraintRequest(constraint=codec.constraint_message(constraint))
        message = await _checked(self._stub.CompileConstraint(request), _COMPILE_TIMEOUT_S)
        return message.problem or None

    async def embed(self, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """A vector for each text."""
        request = shard_pb2.EmbedRequest(
            token_ids=[token_id for text in texts for token_id in text], counts=[len(text) for text in texts]
        )
        message = await _checked(self._stub.Embed(request), self._step_timeout_s)
        values, size = tuple(message.values), len(message.values) // len(texts)
        return [values[start : start + size] for start in range(0, len(values), size)]
