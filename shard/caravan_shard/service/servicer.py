"""The calls of ShardService: each turns a request into a command and the results into replies."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NoReturn, TypeVar, cast

import grpc.aio

from caravan_proto.errors import ShardError, format_error
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_shard.checks.embed import split_texts
from caravan_shard.checks.preview import check_keys
from caravan_shard.constraints.compiler import ConstraintCompiler
from caravan_shard.constraints.constraint import Problem
from caravan_shard.engine.engine import Engine
from caravan_shard.engine.replies import Replies
from caravan_shard.engine.worker import Worker
from caravan_shard.protocol.commands import Command, Embed
from caravan_shard.protocol.results import (
    Embedding,
    Holdings,
    LayoutSet,
    Loaded,
    Refusal,
    Result,
    Saved,
    StepResult,
    bad_request,
)
from caravan_shard.service import command_codec, info_codec, reply_codec
from caravan_shard.service.lease import LeaseWish
from caravan_shard.service.lease_guard import LeaseGuard
from caravan_shard.service.phase import Phase, PhaseSignal
from caravan_shard.service.run_exchange import RunExchange
from caravan_shard.service.text import TextService

Context = grpc.aio.ServicerContext[Any, Any]

_R = TypeVar("_R")

_MIN_WATCH_MS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardParts:
    """The parts of a started shard that answer calls. ``ask_drain`` begins to drain the shard."""

    worker: Worker
    engine: Engine
    lease: LeaseGuard
    phase: PhaseSignal
    text: TextService
    compiler: ConstraintCompiler
    exchange: RunExchange
    ask_drain: Callable[[], None]


class ShardServicer(shard_pb2_grpc.ShardServiceServicer):
    """Runs on the event loop. ``make_info`` makes the reply to Info but for the lease."""

    def __init__(self, make_info: Callable[[], shard_pb2.InfoResponse], parts: ShardParts) -> None:
        self._make_info = make_info
        self._worker = parts.worker
        self._engine = parts.engine
        self._lease = parts.lease
        self._phase = parts.phase
        self._text = parts.text
        self._compiler = parts.compiler
        self._exchange = parts.exchange
        self._ask_drain = parts.ask_drain
        # Commands acquire it in the order in which they arrive.
        self._turn = asyncio.Lock()

    async def Info(self, request: shard_pb2.InfoRequest, context: Context) -> shard_pb2.InfoResponse:
        info = self._make_info()
        info.leased = self._lease.is_held
        info.epoch = self._lease.epoch
        return info

    async def Lease(self, request: shard_pb2.LeaseRequest, context: Context) -> shard_pb2.LeaseResponse:
        if request.release:
            refusal = self._lease.release(request.router_id, request.epoch)
        elif self._is_draining and request.epoch > self._lease.epoch:
            refusal = Refusal(ShardError.DRAINING, "this shard is ending")
        else:
            wish = LeaseWish(request.held_shards, request.urgent)
            refusal = self._lease.ask(request.router_id, wish) if request.if_free else None
            refusal = refusal or self._lease.request(request.router_id, request.epoch, request.ttl_ms / 1000)
        if refusal is not None:
            await _abort(context, refusal)
        return shard_pb2.LeaseResponse(
            steps=self._engine.step_count,
            sequences=self._engine.sequence_count,
            busy=self._worker.is_busy,
            draining=self._is_draining,
        )

    async def Watch(self, request: shard_pb2.WatchRequest, context: Context) -> AsyncIterator[shard_pb2.WatchResponse]:
        if request.interval_ms < _MIN_WATCH_MS:
            await _abort(context, bad_request(f"interval_ms must be >= {_MIN_WATCH_MS}. Given: {request.interval_ms}"))
        is_whole = False
        try:
            while True:
                seen, wish = self._phase.current, self._lease.wish
                yield shard_pb2.WatchResponse(
                    steps=self._engine.step_count,
                    sequences=self._engine.sequence_count,
                    busy=self._worker.is_busy,
                    draining=self._is_draining,
                    wanted_by=None if wish is None else wish.held_shards,
                    wanted_urgently=wish is not None and wish.urgent,
                )
                if seen is Phase.ENDED:
                    is_whole = True
                    return
                await self._phase.wait_for_change(seen, request.interval_ms / 1000)
        finally:
            if request.epoch and not is_whole:
                self._lease.note_broken(request.epoch)

    @property
    def _is_draining(self) -> bool:
        return self._phase.current is not Phase.SERVING

    async def Prefill(self, request: shard_pb2.PrefillRequest, context: Context) -> shard_pb2.PrefillResponse:
        async with self._turn:
            # A running Decode continues meanwhile. Commands that arrive later wait.
            grammars = await self._compiler.compile_all(command_codec.constraints(request))
            if isinstance(grammars, Problem):
                await _abort(context, bad_request(grammars.sentence))
            replies = await self._submit_next(
                command_codec.prefill_command(request, grammars), request.header.epoch, context
            )
        return reply_codec.prefill_response(await _result(replies, StepResult, context))

    async def Decode(
        self, request: shard_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[shard_pb2.DecodeResponse]:
        replies = await self._submit(command_codec.decode_command(request), request.header.epoch, context)
        await context.send_initial_metadata(())
        while (results := await replies.next()) is not None:
            steps = [result for result in results if isinstance(result, StepResult)]
            if steps:
                yield reply_codec.decode_response(steps)
            if len(steps) < len(results):
                await _abort_with(context, results[-1])

    async def Evaluate(self, request: shard_pb2.EvaluateRequest, context: Context) -> shard_pb2.EvaluateResponse:
        replies = await self._submit(command_codec.evaluate_command(request), request.header.epoch, context)
        return reply_codec.evaluate_response(await _result(replies, StepResult, context))

    async def FilterBatch(
        self, request: shard_pb2.FilterBatchRequest, context: Context
    ) -> shard_pb2.FilterBatchResponse:
        replies = await self._submit(command_codec.filter_command(request), request.header.epoch, context)
        return reply_codec.filter_response(await _result(replies, Holdings, context))

    async def Save(self, request: shard_pb2.SaveRequest, context: Context) -> shard_pb2.SaveResponse:
        replies = await self._submit(command_codec.save_command(request), request.header.epoch, context)
        return reply_codec.save_response(await _result(replies, Saved, context))

    async def Load(self, request: shard_pb2.LoadRequest, context: Context) -> shard_pb2.LoadResponse:
        command = command_codec.load_command(request)
        keys = [piece.key for entry in command.entries for piece in entry.slices]
        async with self._turn:
            # A running Decode continues meanwhile. Commands that arrive later wait.
            await asyncio.get_running_loop().run_in_executor(None, self._engine.runs.fetch, keys)
            replies = await self._submit_next(command, request.header.epoch, context)
        return reply_codec.load_response(await _result(replies, Loaded, context))

    async def ListRuns(
        self, request: shard_pb2.ListRunsRequest, context: Context
    ) -> AsyncIterator[shard_pb2.ListRunsResponse]:
        for response in info_codec.runs_responses(self._engine.runs.list_runs()):
            yield response

    async def FetchRuns(self, request: shard_pb2.FetchRunsRequest, context: Context) -> shard_pb2.FetchRunsResponse:
        await self._check_epoch(request.epoch, context)
        refusal = check_keys(request.keys) if request.source_address else bad_request("there is no source_address")
        if refusal is not None:
            await _abort(context, refusal)
        began_ns = perf_counter_ns()
        source = (request.source_address, request.source_hostname, request.source_epoch)
        fetched = await self._exchange.fetch(*source, request.keys)
        return shard_pb2.FetchRunsResponse(fetched=fetched, total_ns=perf_counter_ns() - began_ns)

    async def ReadRun(
        self, request: shard_pb2.ReadRunRequest, context: Context
    ) -> AsyncIterator[shard_pb2.ReadRunResponse]:
        await self._check_epoch(request.epoch, context)
        is_here = False
        async for part in self._exchange.send(request.key):
            is_here = True
            yield shard_pb2.ReadRunResponse(part=part)
        if not is_here:
            await _abort(context, Refusal(ShardError.UNKNOWN_RUN, f"run {request.key.hex()[:32]} is not here"))

    async def Drain(self, request: shard_pb2.DrainRequest, context: Context) -> shard_pb2.DrainResponse:
        await self._check_epoch(request.epoch, context)
        self._ask_drain()
        return shard_pb2.DrainResponse()

    async def SetLayout(self, request: shard_pb2.SetLayoutRequest, context: Context) -> shard_pb2.SetLayoutResponse:
        replies = await self._submit(command_codec.layout_command(request), request.header.epoch, context)
        return reply_codec.layout_response(await _result(replies, LayoutSet, context))

    async def Tokenize(self, request: shard_pb2.TokenizeRequest, context: Context) -> shard_pb2.TokenizeResponse:
        if request.HasField("document"):
            tokens = await self._text.tokenize_pair(request.text, request.document)
        else:
            tokens = await self._text.tokenize(
                request.text, add_special=request.add_special, parse_special=request.parse_special
            )
        if isinstance(tokens, Refusal):
            await _abort(context, tokens)
        return reply_codec.tokenize_response(tokens.token_ids, tokens.pieces)

    async def Detokenize(self, request: shard_pb2.DetokenizeRequest, context: Context) -> shard_pb2.DetokenizeResponse:
        pieces = await self._text.detokenize(list(request.token_ids), skip_special=request.skip_special)
        if isinstance(pieces, Refusal):
            await _abort(context, pieces)
        return reply_codec.detokenize_response(pieces)

    async def CompileConstraint(
        self, request: shard_pb2.CompileConstraintRequest, context: Context
    ) -> shard_pb2.CompileConstraintResponse:
        constraint = command_codec.constraint(request.constraint)
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
            # A command for each text, so that other commands need not wait for all of them.
            embedding = await _result(self._queue(Embed(text), context), Embedding, context)
            response.values.extend(embedding.values.tolist())
        return response

    async def _submit(self, command: Command, epoch: int, context: Context) -> Replies:
        """Queue a command of the router that holds the lease, after the commands that arrived before it."""
        async with self._turn:
            return await self._submit_next(command, epoch, context)

    async def _submit_next(self, command: Command, epoch: int, context: Context) -> Replies:
        """Queue a command. Awaits only to refuse it, so that the order of commands is kept."""
        await self._check_epoch(epoch, context)
        return self._queue(command, context)

    async def _check_epoch(self, epoch: int, context: Context) -> None:
        refusal = self._lease.check(epoch)
        if refusal is not None:
            await _abort(context, refusal)

    def _queue(self, command: Command, context: Context) -> Replies:
        replies = self._worker.submit(command)
        context.add_done_callback(cast("Any", lambda _context: replies.cancel()))
        return replies


async def _abort(context: Context, refusal: Refusal) -> NoReturn:
    await context.abort(refusal.error.status, format_error(refusal.error, refusal.sentence))


async def _result(replies: Replies, kind: type[_R], context: Context) -> _R:
    """Return the one result of a command; abort the call if the command was refused."""
    (result,) = await replies.next() or (None,)
    if not isinstance(result, kind):
        await _abort_with(context, result)
    return result


async def _abort_with(context: Context, result: Result | None) -> NoReturn:
    assert isinstance(result, Refusal), f"{result} is no answer to this command"
    await _abort(context, result)
