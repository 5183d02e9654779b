"""ShardService: request to command, result to reply. No logic of its own."""

import asyncio
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any, NoReturn, cast

import grpc.aio

import caravan_proto
from caravan_proto.errors import ShardError, format_error
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_shard.checks.embed import split_texts
from caravan_shard.checks.sampling import MAX_TOP_N_TOKENS
from caravan_shard.constraints.compiler import ConstraintCompiler
from caravan_shard.constraints.constraint import Problem
from caravan_shard.engine.engine import Engine
from caravan_shard.engine.replies import Replies
from caravan_shard.engine.worker import Worker
from caravan_shard.protocol.commands import Command, Embed
from caravan_shard.protocol.results import (
    Embedding,
    Holdings,
    Refusal,
    Result,
    StepResult,
    SwappedIn,
    SwappedOut,
    bad_request,
)
from caravan_shard.service import codec
from caravan_shard.service.health import HealthMonitor
from caravan_shard.service.lease import LeaseBook, LeaseChange
from caravan_shard.service.phase import Phase, PhaseSignal
from caravan_shard.service.text import TextService

Context = grpc.aio.ServicerContext[Any, Any]

MIN_WATCH_MS = 100
OVERTAKEN = Refusal(ShardError.STALE_EPOCH, "another lease took the shard")


class ShardServicer(shard_pb2_grpc.ShardServiceServicer):
    """Everything here runs on the event loop."""

    def __init__(
        self,
        *,
        shard_id: str,
        incarnation: str,
        worker: Worker,
        engine: Engine,
        lease: LeaseBook,
        health: HealthMonitor,
        phase: PhaseSignal,
        text: TextService,
        compiler: ConstraintCompiler,
        max_tokenize_bytes: int,
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._lease = lease
        self._health = health
        self._phase = phase
        self._text = text
        self._compiler = compiler
        # Taken in the order of asking.
        self._turn = asyncio.Lock()
        backend = engine.backend
        self._info = shard_pb2.InfoResponse(
            shard_id=shard_id,
            incarnation=incarnation,
            model=codec.model_info(backend.facts),
            limits=codec.limits(
                backend.capacity,
                max_top_n_tokens=MAX_TOP_N_TOKENS,
                max_tokenize_bytes=max_tokenize_bytes,
                swap_bytes=engine.swap_bytes,
            ),
            version=caravan_proto.__version__,
        )

    async def Info(self, request: shard_pb2.InfoRequest, context: Context) -> shard_pb2.InfoResponse:
        self._health.expire_lease()
        info = shard_pb2.InfoResponse()
        info.CopyFrom(self._info)
        info.epoch = self._lease.epoch
        info.leased = self._lease.is_held
        return info

    async def Lease(self, request: shard_pb2.LeaseRequest, context: Context) -> shard_pb2.LeaseResponse:
        self._health.expire_lease()
        if self._is_draining and request.epoch > self._lease.epoch:
            await _abort(context, Refusal(ShardError.DRAINING, "this shard is ending"))
        granted = self._lease.request(request.router_id, request.epoch, request.ttl_ms / 1000, monotonic())
        if isinstance(granted, Refusal):
            await _abort(context, granted)
        if granted is LeaseChange.TAKEN:
            self._worker.release_all(OVERTAKEN)
        return shard_pb2.LeaseResponse(
            steps=self._engine.step_count,
            sequences=self._engine.sequence_count,
            busy=self._worker.is_busy,
            draining=self._is_draining,
        )

    async def Watch(self, request: shard_pb2.WatchRequest, context: Context) -> AsyncIterator[shard_pb2.WatchResponse]:
        if request.interval_ms < MIN_WATCH_MS:
            await _abort(context, bad_request(f"interval_ms must be >= {MIN_WATCH_MS}. Given: {request.interval_ms}"))
        while True:
            seen = self._phase.current
            yield shard_pb2.WatchResponse(
                steps=self._engine.step_count,
                sequences=self._engine.sequence_count,
                busy=self._worker.is_busy,
                draining=self._is_draining,
            )
            if seen is Phase.ENDED:
                return
            await self._phase.wait_for_change(seen, request.interval_ms / 1000)

    @property
    def _is_draining(self) -> bool:
        return self._phase.current is not Phase.SERVING

    async def Prefill(self, request: shard_pb2.PrefillRequest, context: Context) -> shard_pb2.PrefillResponse:
        async with self._turn:
            # Meanwhile a Decode that runs goes on. What comes after this command waits for it.
            grammars = await self._compiler.compile_all(codec.constraints(request))
            if isinstance(grammars, Problem):
                await _abort(context, bad_request(grammars.sentence))
            replies = await self._submit_next(codec.prefill_command(request, grammars), request.header.epoch, context)
        result = await replies.next()
        if not isinstance(result, StepResult):
            await _abort_with(context, result)
        return codec.prefill_response(result)

    async def Decode(
        self, request: shard_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[shard_pb2.DecodeResponse]:
        replies = await self._submit(codec.decode_command(request), request.header.epoch, context)
        await context.send_initial_metadata(())
        while (result := await replies.next()) is not None:
            if isinstance(result, StepResult):
                yield codec.decode_response(result)
            else:
                await _abort_with(context, result)

    async def FilterBatch(
        self, request: shard_pb2.FilterBatchRequest, context: Context
    ) -> shard_pb2.FilterBatchResponse:
        replies = await self._submit(codec.filter_command(request), request.header.epoch, context)
        result = await replies.next()
        if not isinstance(result, Holdings):
            await _abort_with(context, result)
        return codec.filter_response(result)

    async def SwapOut(self, request: shard_pb2.SwapOutRequest, context: Context) -> shard_pb2.SwapOutResponse:
        replies = await self._submit(codec.swap_out_command(request), request.header.epoch, context)
        result = await replies.next()
        if not isinstance(result, SwappedOut):
            await _abort_with(context, result)
        return codec.swap_out_response(result)

    async def SwapIn(self, request: shard_pb2.SwapInRequest, context: Context) -> shard_pb2.SwapInResponse:
        replies = await self._submit(codec.swap_in_command(request), request.header.epoch, context)
        result = await replies.next()
        if not isinstance(result, SwappedIn):
            await _abort_with(context, result)
        return codec.swap_in_response(result)

    async def Tokenize(self, request: shard_pb2.TokenizeRequest, context: Context) -> shard_pb2.TokenizeResponse:
        tokens = await self._text.tokenize(
            request.text, add_special=request.add_special, parse_special=request.parse_special
        )
        if isinstance(tokens, Refusal):
            await _abort(context, tokens)
        return codec.tokenize_response(tokens.token_ids, tokens.pieces)

    async def Detokenize(self, request: shard_pb2.DetokenizeRequest, context: Context) -> shard_pb2.DetokenizeResponse:
        pieces = await self._text.detokenize(list(request.token_ids), skip_special=request.skip_special)
        if isinstance(pieces, Refusal):
            await _abort(context, pieces)
        return codec.detokenize_response(pieces)

    async def CompileConstraint(
        self, request: shard_pb2.CompileConstraintRequest, context: Context
    ) -> shard_pb2.CompileConstraintResponse:
        constraint = codec.constraint(request.constraint)
        if constraint is None:
            await _abort(context, bad_request("there is no constraint"))
        outcome = await self._compiler.compile(constraint)
        return shard_pb2.CompileConstraintResponse(problem=outcome.sentence if isinstance(outcome, Problem) else "")

    async def Embed(self, request: shard_pb2.EmbedRequest, context: Context) -> shard_pb2.EmbedResponse:
        backend = self._engine.backend
        texts = split_texts(request.token_ids, request.counts, backend.capacity, backend.facts.vocabulary_size)
        if isinstance(texts, Refusal):
            await _abort(context, texts)
        response = shard_pb2.EmbedResponse()
        for text in texts:
            # One command a text: whatever else was asked meanwhile comes between two of them.
            result = await self._queue(Embed(text), context).next()
            if not isinstance(result, Embedding):
                await _abort_with(context, result)
            response.values.extend(result.values.tolist())
        return response

    async def _submit(self, command: Command, epoch: int, context: Context) -> Replies:
        """Queue a command of the router that holds the lease, after those that came before it."""
        async with self._turn:
            return await self._submit_next(command, epoch, context)

    async def _submit_next(self, command: Command, epoch: int, context: Context) -> Replies:
        """Awaits only to refuse, so that order is kept."""
        self._health.expire_lease()
        refusal = self._lease.check(epoch)
        if refusal is not None:
            await _abort(context, refusal)
        return self._queue(command, context)

    def _queue(self, command: Command, context: Context) -> Replies:
        replies = self._worker.submit(command)
        context.add_done_callback(cast("Any", lambda _context: replies.cancel()))
        return replies


async def _abort(context: Context, refusal: Refusal) -> NoReturn:
    await context.abort(refusal.error.status, format_error(refusal.error, refusal.sentence))


async def _abort_with(context: Context, result: Result | None) -> NoReturn:
    assert isinstance(result, Refusal), f"{result} is no answer to this command"
    await _abort(context, result)
