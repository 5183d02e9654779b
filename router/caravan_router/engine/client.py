"""One gRPC channel to one shard: typed calls with deadlines. Every failure is a ShardRpcError."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from itertools import chain, islice
from typing import TypeVar, assert_never

import grpc
import grpc.aio

from caravan_proto.channel import client_options
from caravan_proto.errors import parse_error
from caravan_proto.messages.adapters import AdapterSource, LoadedAdapter
from caravan_proto.messages.commands import Command, Decode, Evaluate, FilterBatch, Load, Prefill, Save, SetLayout
from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.media import EncodedMedia, PromptPart, TokenizedParts
from caravan_proto.messages.model import ShardClaim, ShardStatus, TokenizedText
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_proto.wire import (
    CONSTRAINT,
    ENCODED_MEDIA,
    INFO,
    LAYOUT_SET,
    LOADED,
    MEDIA_SHAPE,
    SAVED,
    STATUS,
    TOKENIZED_PARTS,
    TOKENIZED_TEXT,
    encode_command,
    encode_parts,
)
from caravan_router.engine import reply_codec
from caravan_router.engine.media import content_of, shape_of
from caravan_router.engine.shard_calls import Reply, ShardInfo, ShardRpcError, TextCount
from caravan_scheduler.actions import Fetch
from caravan_scheduler.core.media import Media
from caravan_scheduler.events import SavedRun

_T = TypeVar("_T")

_CONTROL_TIMEOUT_S = 5.0
# A transfer between two shards that is slower is given up.
_LEAST_BYTES_PER_S = 10e6
# A timer that is later than this means that this process did not run.
_LATE_S = 0.25
# Tokenizing the longest text that a shard accepts takes seconds.
_TOKENIZE_TIMEOUT_S = 30.0
_COMPILE_TIMEOUT_S = 30.0
# A large picture takes a minute on a slow processor, and several may wait.
_ENCODE_TIMEOUT_S = 600.0
# All bytes of an adapter are read, maybe from a slow file system.
_LOAD_TIMEOUT_S = 600.0


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
        self.embedding, self.tokenizing = TextCount(), TextCount()

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
        return ShardInfo.of(INFO.decode(await _checked(self._stub.Info(shard_pb2.InfoRequest()), _CONTROL_TIMEOUT_S)))

    async def lease(
        self, router_id: str, epoch: int, ttl_s: float, claim: ShardClaim | None = None, url: str = ""
    ) -> None:
        """Take the shard with a new epoch, or keep it with the same one. ``claim``, ``url``: as in `ShardCalls`."""
        request = shard_pb2.LeaseRequest(
            router_id=router_id,
            epoch=epoch,
            ttl_ms=int(ttl_s * 1000),
            if_free=claim is not None,
            held_shards=0 if claim is None else claim.held,
            urgent=claim is not None and claim.urgent,
            url=url,
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
            runs += reply_codec.saved_runs(message)
        return tuple(runs)

    async def load_adapter(self, source: AdapterSource, epoch: int) -> LoadedAdapter:
        """Let the shard load an adapter, until it is unloaded or the lease ends."""
        request = shard_pb2.LoadAdapterRequest(epoch=epoch, name=source.name, path=source.path, scale=source.scale)
        message = await _checked(self._stub.LoadAdapter(request), _LOAD_TIMEOUT_S)
        return LoadedAdapter(key=message.key, size_bytes=message.size_bytes)

    async def unload_adapter(self, key: str, epoch: int) -> None:
        """Let the shard free an adapter; refused with ADAPTER_IN_USE while a sequence with it has not ended."""
        await _checked(self._stub.UnloadAdapter(shard_pb2.UnloadAdapterRequest(epoch=epoch, key=key)), _LOAD_TIMEOUT_S)

    async def watch(self, interval_s: float, silence_s: float, epoch: int = 0) -> AsyncGenerator[ShardStatus, None]:
        """Yield the shard's status when it starts to drain and at least every ``interval_s``; end when it ends.

        ``epoch``: of the lease that soon ends when this stream breaks off; 0 for none.

        Raises ShardRpcError after ``silence_s`` without a status.
        """
        call = self._stub.Watch(shard_pb2.WatchRequest(interval_ms=int(interval_s * 1000), epoch=epoch))
        while isinstance(message := await _heard(call.read(), silence_s), shard_pb2.WatchResponse):
            yield STATUS.decode(message)

    async def start(self, command: Command, epoch: int) -> AsyncIterator[Sequence[Reply]]:
        """Send ``command`` and return its replies, one for each step, or one; those of a message together.

        What is started later runs later.
        """
        stub, request = self._stub, encode_command(command, epoch)
        match command:
            case Decode():
                request.reply_interval_ms = self._stream_interval_ms
                steps = stub.Decode(request)
                await _checked(steps.initial_metadata(), self._step_timeout_s)
                return self._step_replies(command, steps)
            case Prefill():
                return self._reply(command, stub.Prefill(request), reply_codec.stepped)
            case Evaluate():
                return self._reply(command, stub.Evaluate(request), reply_codec.evaluated)
            case Save():
                return self._reply(command, stub.Save(request), SAVED.decode)
            case Load():
                return self._reply(command, stub.Load(request), LOADED.decode)
            case SetLayout():
                return self._reply(command, stub.SetLayout(request), LAYOUT_SET.decode)
            case FilterBatch():
                return self._reply(command, stub.FilterBatch(request), None)
            case _:
                assert_never(command)

    async def _reply(
        self, command: Command, call: Awaitable[_T], decode: Callable[..., Reply] | None
    ) -> AsyncIterator[Sequence[Reply]]:
        message = await _checked(call, self._step_timeout_s)
        if decode is not None:
            yield (decode(message, shard=self._address, command_id=command.command_id),)

    async def _step_replies(
        self, command: Decode, call: grpc.aio.UnaryStreamCall[shard_pb2.DecodeRequest, shard_pb2.DecodeResponse]
    ) -> AsyncIterator[Sequence[Reply]]:
        # Without a deadline, which would cost a timer per step: the link watches whether steps complete.
        try:
            while isinstance(message := await call.read(), shard_pb2.DecodeResponse):
                yield [
                    reply_codec.stepped(step, shard=self._address, command_id=command.command_id)
                    for step in message.steps
                ]
        except grpc.aio.AioRpcError as rpc_error:
            raise _shard_error(rpc_error) from None

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool = True) -> TokenizedText:
        """Return the tokens of ``text``; with ``parse_special``, the text of a control token becomes that token."""
        request = shard_pb2.TokenizeRequest(text=text, add_special=add_special, parse_special=parse_special)
        with self.tokenizing.during(1):
            message = await _checked(self._stub.Tokenize(request), _TOKENIZE_TIMEOUT_S)
        return TOKENIZED_TEXT.decode(message)

    async def tokenize_texts(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[tuple[int, ...]]:
        """Return the token ids of each text as `tokenize` does."""
        return await self._token_ids(
            shard_pb2.TokenizeTextsRequest(texts=texts, add_special=add_special, parse_special=parse_special)
        )

    async def tokenize_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[int, ...]]:
        """Return the token ids of each pair of a query and a document as a model that ranks reads it."""
        queries, documents = zip(*pairs, strict=True)
        return await self._token_ids(shard_pb2.TokenizeTextsRequest(texts=queries, documents=documents))

    async def _token_ids(self, request: shard_pb2.TokenizeTextsRequest) -> list[tuple[int, ...]]:
        count = len(request.texts)
        with self.tokenizing.during(count):
            message = await _checked(self._stub.TokenizeTexts(request), _TOKENIZE_TIMEOUT_S)
        ids = iter(message.token_ids)
        return [tuple(islice(ids, count)) for count in message.counts]

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        """Return the pieces of ``token_ids``."""
        request = shard_pb2.DetokenizeRequest(token_ids=token_ids)
        message = await _checked(self._stub.Detokenize(request), _TOKENIZE_TIMEOUT_S)
        return TokenizedText(tuple(token_ids), tuple(message.pieces), tuple(message.specials))

    async def tokenize_parts(self, parts: Sequence[PromptPart]) -> TokenizedParts:
        """Return the cells of a prompt of texts and media."""
        with self.tokenizing.during(1):
            message = await _checked(self._stub.TokenizeParts(encode_parts(parts)), _TOKENIZE_TIMEOUT_S)
        return TOKENIZED_PARTS.decode(message)

    async def encode_media(self, media: Media) -> EncodedMedia:
        """Encode a medium, unless the shard has its embeddings."""
        request = shard_pb2.EncodeMediaRequest(shape=MEDIA_SHAPE.encode(shape_of(media)), data=content_of(media))
        return ENCODED_MEDIA.decode(await _checked(self._stub.EncodeMedia(request), _ENCODE_TIMEOUT_S))

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        """Compile ``constraint``; return what is wrong with it, or None."""
        request = shard_pb2.CompileConstraintRequest(constraint=CONSTRAINT.encode(constraint))
        message = await _checked(self._stub.CompileConstraint(request), _COMPILE_TIMEOUT_S)
        return message.problem or None

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the vector of each text, given as tokens. Every text that is being embedded may take a step's time."""
        request = shard_pb2.EmbedRequest(token_ids=chain.from_iterable(texts), counts=map(len, texts))
        with self.embedding.during(len(texts)):
            values = (await _checked(self._stub.Embed(request), self._step_timeout_s * self.embedding.texts)).values
        size = len(values) // len(texts)
        return [tuple(values[start : start + size]) for start in range(0, len(values), size)]
