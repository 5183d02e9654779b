"""The calls of ShardService over gRPC: each decodes a request, and encodes what the shard answers."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import chain
from time import perf_counter_ns
from typing import Any, NoReturn, TypeVar, cast

import grpc.aio

from caravan_proto.codec import Codec, MalformedError
from caravan_proto.errors import ShardError, format_error
from caravan_proto.messages.adapters import AdapterSource
from caravan_proto.messages.model import ShardClaim
from caravan_proto.messages.results import Holdings, LayoutSet, Loaded, Saved
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_proto.wire import (
    CONSTRAINT,
    DECODE,
    ENCODED_MEDIA,
    EVALUATE,
    FILTER_BATCH,
    HOLDINGS,
    INFO,
    LAYOUT_SET,
    LOAD,
    LOADED,
    MEDIA_SHAPE,
    PREFILL,
    SAVE,
    SAVED,
    SET_LAYOUT,
    STATUS,
    TOKENIZED_PARTS,
    TOKENIZED_TEXT,
    decode_parts,
)
from caravan_shard.engine.replies import Replies
from caravan_shard.protocol.results import Refusal, Result, StepResult, bad_request
from caravan_shard.service import codec
from caravan_shard.service.calls import CallHandler

Context = grpc.aio.ServicerContext[Any, Any]

_T = TypeVar("_T")

_MIN_WATCH_MS = 100


class ShardServicer(shard_pb2_grpc.ShardServiceServicer):
    """Runs on the event loop."""

    def __init__(self, calls: CallHandler) -> None:
        self._calls = calls

    async def Info(self, request: shard_pb2.InfoRequest, context: Context) -> shard_pb2.InfoResponse:
        return INFO.encode(self._calls.info())

    async def Lease(self, request: shard_pb2.LeaseRequest, context: Context) -> shard_pb2.LeaseResponse:
        if request.release:
            refusal = self._calls.give_back(request.router_id, request.epoch)
        else:
            claim = ShardClaim(request.held_shards, request.urgent) if request.if_free else None
            refusal = self._calls.lease(request.router_id, request.epoch, request.ttl_ms / 1000, claim, request.url)
        await _accepted(refusal, context)
        status = self._calls.status
        return shard_pb2.LeaseResponse(
            steps=status.steps, sequences=status.sequences, busy=status.busy, draining=status.draining
        )

    async def Watch(self, request: shard_pb2.WatchRequest, context: Context) -> AsyncIterator[shard_pb2.WatchResponse]:
        if request.interval_ms < _MIN_WATCH_MS:
            await _abort(context, bad_request(f"interval_ms must be >= {_MIN_WATCH_MS}. Given: {request.interval_ms}"))
        async with aclosing(self._calls.watch(request.interval_ms / 1000, request.epoch)) as statuses:
            async for status in statuses:
                yield STATUS.encode(status)

    async def Prefill(self, request: shard_pb2.PrefillRequest, context: Context) -> shard_pb2.PrefillResponse:
        replies = await self._submit(PREFILL, request, context)
        return codec.prefill_response(await _result(replies, StepResult, context))

    async def Decode(
        self, request: shard_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[shard_pb2.DecodeResponse]:
        replies = await self._submit(DECODE, request, context)
        await context.send_initial_metadata(())
        while (results := await replies.next()) is not None:
            steps = [result for result in results if isinstance(result, StepResult)]
            if steps:
                yield codec.decode_response(steps)
            if len(steps) < len(results):
                await _abort_with(context, results[-1])

    async def Evaluate(self, request: shard_pb2.EvaluateRequest, context: Context) -> shard_pb2.EvaluateResponse:
        replies = await self._submit(EVALUATE, request, context)
        return codec.evaluate_response(await _result(replies, StepResult, context))

    async def FilterBatch(
        self, request: shard_pb2.FilterBatchRequest, context: Context
    ) -> shard_pb2.FilterBatchResponse:
        replies = await self._submit(FILTER_BATCH, request, context)
        return HOLDINGS.encode(await _result(replies, Holdings, context))

    async def Save(self, request: shard_pb2.SaveRequest, context: Context) -> shard_pb2.SaveResponse:
        replies = await self._submit(SAVE, request, context)
        return SAVED.encode(await _result(replies, Saved, context))

    async def Load(self, request: shard_pb2.LoadRequest, context: Context) -> shard_pb2.LoadResponse:
        replies = await self._submit(LOAD, request, context)
        return LOADED.encode(await _result(replies, Loaded, context))

    async def SetLayout(self, request: shard_pb2.SetLayoutRequest, context: Context) -> shard_pb2.SetLayoutResponse:
        replies = await self._submit(SET_LAYOUT, request, context)
        return LAYOUT_SET.encode(await _result(replies, LayoutSet, context))

    async def LoadAdapter(
        self, request: shard_pb2.LoadAdapterRequest, context: Context
    ) -> shard_pb2.LoadAdapterResponse:
        source = AdapterSource(name=request.name, path=request.path, scale=request.scale)
        loaded = await _accepted(await self._calls.adapters.load(source, request.epoch), context)
        return shard_pb2.LoadAdapterResponse(key=loaded.key, size_bytes=loaded.size_bytes)

    async def UnloadAdapter(
        self, request: shard_pb2.UnloadAdapterRequest, context: Context
    ) -> shard_pb2.UnloadAdapterResponse:
        await _accepted(await self._calls.adapters.unload(request.key, request.epoch), context)
        return shard_pb2.UnloadAdapterResponse()

    async def ListRuns(
        self, request: shard_pb2.ListRunsRequest, context: Context
    ) -> AsyncIterator[shard_pb2.ListRunsResponse]:
        for response in codec.runs_responses(self._calls.list_runs()):
            yield response

    async def FetchRuns(self, request: shard_pb2.FetchRunsRequest, context: Context) -> shard_pb2.FetchRunsResponse:
        began_ns = perf_counter_ns()
        source = (request.source_address, request.source_hostname, request.source_epoch)
        fetched = await _accepted(await self._calls.fetch_runs(*source, request.keys, request.epoch), context)
        return shard_pb2.FetchRunsResponse(fetched=fetched, total_ns=perf_counter_ns() - began_ns)

    async def ReadRun(
        self, request: shard_pb2.ReadRunRequest, context: Context
    ) -> AsyncIterator[shard_pb2.ReadRunResponse]:
        is_here = False
        async for part in await _accepted(self._calls.read_run(request.key, request.epoch), context):
            is_here = True
            yield shard_pb2.ReadRunResponse(part=part)
        if not is_here:
            await _abort(context, Refusal(ShardError.UNKNOWN_RUN, f"run {request.key.hex()[:32]} is not here"))

    async def Drain(self, request: shard_pb2.DrainRequest, context: Context) -> shard_pb2.DrainResponse:
        await _accepted(self._calls.drain(request.epoch), context)
        return shard_pb2.DrainResponse()

    async def Tokenize(self, request: shard_pb2.TokenizeRequest, context: Context) -> shard_pb2.TokenizeResponse:
        found = await self._calls.text.tokenize(
            request.text, add_special=request.add_special, parse_special=request.parse_special
        )
        return TOKENIZED_TEXT.encode(await _accepted(found, context))

    async def TokenizeTexts(
        self, request: shard_pb2.TokenizeTextsRequest, context: Context
    ) -> shard_pb2.TokenizeTextsResponse:
        if request.documents:
            found = await self._calls.text.tokenize_pairs(request.texts, request.documents)
        else:
            found = await self._calls.text.tokenize_texts(
                request.texts, add_special=request.add_special, parse_special=request.parse_special
            )
        texts = await _accepted(found, context)
        return shard_pb2.TokenizeTextsResponse(token_ids=chain.from_iterable(texts), counts=map(len, texts))

    async def Detokenize(self, request: shard_pb2.DetokenizeRequest, context: Context) -> shard_pb2.DetokenizeResponse:
        found = await self._calls.text.detokenize(list(request.token_ids), skip_special=request.skip_special)
        text = await _accepted(found, context)
        return shard_pb2.DetokenizeResponse(text=b"".join(text.pieces), pieces=text.pieces, specials=text.specials)

    async def CompileConstraint(
        self, request: shard_pb2.CompileConstraintRequest, context: Context
    ) -> shard_pb2.CompileConstraintResponse:
        constraint = CONSTRAINT.decode(request.constraint)
        if constraint is None:
            await _abort(context, bad_request("there is no constraint"))
        problem = await _accepted(await self._calls.compile_constraint(constraint), context)
        return shard_pb2.CompileConstraintResponse(problem="" if problem is None else problem.sentence)

    async def Embed(self, request: shard_pb2.EmbedRequest, context: Context) -> shard_pb2.EmbedResponse:
        values = await _accepted(await self._calls.embed(request.token_ids, request.counts), context)
        return shard_pb2.EmbedResponse(values=values)

    async def TokenizeParts(
        self, request: shard_pb2.TokenizePartsRequest, context: Context
    ) -> shard_pb2.TokenizePartsResponse:
        try:
            parts = decode_parts(request)
        except MalformedError as error:
            await _abort(context, bad_request(str(error)))
        return TOKENIZED_PARTS.encode(await _accepted(await self._calls.media.tokenize(parts), context))

    async def EncodeMedia(
        self, request: shard_pb2.EncodeMediaRequest, context: Context
    ) -> shard_pb2.EncodeMediaResponse:
        shape = MEDIA_SHAPE.decode(request.shape)
        return ENCODED_MEDIA.encode(await _accepted(await self._calls.media.encode(shape, request.data), context))

    async def _submit(self, message_codec: Codec[Any, Any], request: Any, context: Context) -> Replies:
        try:
            command = message_codec.decode(request)
        except MalformedError as error:
            await _abort(context, bad_request(str(error)))
        replies = await _accepted(await self._calls.submit(command, request.header.epoch), context)
        context.add_done_callback(cast("Any", lambda _context: replies.cancel()))
        return replies


async def _abort(context: Context, refusal: Refusal) -> NoReturn:
    await context.abort(refusal.error.status, format_error(refusal.error, refusal.sentence))


async def _accepted(answer: _T | Refusal, context: Context) -> _T:
    """Return the answer to a call; abort the call if it was refused."""
    if isinstance(answer, Refusal):
        await _abort(context, answer)
    return answer


async def _result(replies: Replies, kind: type[_T], context: Context) -> _T:
    """Return the one result of a command; abort the call if the command was refused."""
    (result,) = await replies.next() or (None,)
    if not isinstance(result, kind):
        await _abort_with(context, result)
    return result


async def _abort_with(context: Context, result: Result | None) -> NoReturn:
    assert isinstance(result, Refusal), f"{result} is no answer to this command"
    await _abort(context, result)
