"""The calls of a model in this process, on one event loop."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caravan import errors
from caravan.adapters import LocalAdapters
from caravan.calls import OnOutput
from caravan.engine_requests import EngineRequests
from caravan.local_engine import LocalEngine, OnFailure, cancelled
from caravan.options import MAX_CANDIDATES, MAX_STOPS, ServerOptions, check_names, split_options
from caravan.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from caravan.prompts import CHAT_PARAMS, ChatCall, Messages, PlainPrompt
from caravan.python_names import python_names
from caravan.replies import ChatParts, chat_output, completion_output, prompt_logprobs
from caravan.request_bodies import chat_body, decision_body
from caravan.sampling_params import SamplingParams
from caravan.server import Served
from caravan.valid_requests import (
    choices_in,
    embedded_ids,
    named_errors,
    valid_chat,
    valid_chats,
    valid_completion,
    valid_completions,
)
from caravan_dialects.ahead import each
from caravan_dialects.api.generation.context import Context, ServedModel
from caravan_dialects.api.generation.prompt import check_token_ids
from caravan_dialects.api.generation.run import Run, ValidRequest, collect, on_all, started, together
from caravan_dialects.api.generation.serving import Sender
from caravan_dialects.api.limits import Limits, bounds_of
from caravan_dialects.api.openai.chat.output import read_whole
from caravan_dialects.api.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_dialects.api.openai.chat.validation import ValidChat
from caravan_dialects.api.openai.choices import check_streamed
from caravan_dialects.api.openai.decisions.reply import AskedDecision
from caravan_dialects.api.openai.decisions.schema import Decision
from caravan_dialects.api.openai.embeddings import TextsOf, Vectors, vectors_in
from caravan_dialects.api.openai.scoring import Texts, scores_of
from caravan_dialects.auth.key import NO_KEY
from caravan_dialects.text.assembler import Piece
from caravan_proto.flags import from_values
from caravan_proto.limits import MOST_ROLLBACK_TOKENS
from caravan_proto.packages import Part, lack
from caravan_router.config import RouterConfig
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.core.prompt_media import text_ids
from caravan_scheduler.core.trace import NO_TRACE
from caravan_shard.checks.sampling import MAX_TOP_N_TOKENS
from caravan_shard.config import ShardConfig
from caravan_shard.sampling.processors import ProcessorRegistry

if TYPE_CHECKING:
    from caravan.local_server import LocalServer

# More generations wait outside the scheduler, which looks at all that wait inside.
_MAX_SUBMITTED = 256


class LocalModel:
    """Create it, `open` it, and finally `close` it, all on one event loop. Every call raises the package's errors."""

    def __init__(self, model: str | Path, options: Mapping[str, Any]) -> None:
        """Raises TypeError or ValueError if an option is unknown or wrong."""
        of_model, of_engine = split_options(model, options)
        if of_engine.get("speculate"):
            of_model.setdefault("rollback_tokens", min(of_engine["speculate"], MOST_ROLLBACK_TOKENS))
        self._engine_options = of_engine
        with python_names():
            self._shard_config = from_values(ShardConfig, of_model)
            self._router_config = from_values(RouterConfig, of_engine)
        self._limits = Limits(
            max_best_of=MAX_CANDIDATES,
            max_stop_sequences=MAX_STOPS,
            max_top_n_tokens=MAX_TOP_N_TOKENS,
            max_draft_tokens=self._router_config.speculate,
        )
        self._metrics = Metrics()
        self._request_ids = itertools.count()
        self._turns = asyncio.Semaphore(_MAX_SUBMITTED)
        self._opened: LocalEngine | None = None
        self.requests = EngineRequests(self)
        """Those of `LLMEngine`."""
        self.adapters = LocalAdapters(self._use)

    async def open(self, on_failure: OnFailure) -> None:
        """Load the model. ``on_failure``: see `LocalEngine.started`. Raises ModelError."""
        self._opened = await LocalEngine.started(self._shard_config, self._router_config, self._metrics, on_failure)

    async def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        await self.requests.end()
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()

    def _context(self, adapter: str = "") -> Context:
        opened = self._use()
        engine = opened.fleet.engine("")
        assert engine is not None
        facts = engine.model
        if adapter and adapter not in facts.adapters:
            raise errors.RequestError(f"there is no adapter {adapter!r}")
        return Context(
            sender=Sender(key=NO_KEY, headers={}),
            limits=self._limits,
            templates=opened.templates,
            decoding=opened.decoder,
            served=ServedModel(engine, self._metrics.of(facts.name)),
            model=facts,
            adapter=adapter,
            bounds=bounds_of(self._limits, facts),
        )

    async def serve(self, options: Mapping[str, Any]) -> Served:
        """Start a server over the model. Raises ServerError, and TypeError or ValueError if an option is wrong."""
        check_names(options, ServerOptions.__annotations__)
        opened = self._use()
        with python_names():
            server = await _server_type().started(opened.fleet, self._metrics, {**self._engine_options, **options})
        opened.servers.add(server)
        server.call_at_end(lambda: opened.servers.discard(server))
        return server

    def _use(self) -> LocalEngine:
        if self._opened is None:
            raise errors.ClosedError("the model is closed")
        return self._opened

    async def generate(
        self, prompts: Sequence[PlainPrompt], params: Sequence[SamplingParams], adapter: str, on_output: OnOutput
    ) -> list[RequestOutput]:
        """Generate for all prompts, each with its own parameters. Nothing runs unless all of them are valid."""
        context = self._context(adapter)

        async def output(number: int, request: ValidRequest) -> RequestOutput:
            own = params[number]
            with self._started(context, request, own) as (runs, check):
                collected = await collect(runs)
                check()
            stops = request.text.stops
            made = self._output(
                prompts[number],
                request,
                runs,
                [
                    completion_output(index, collected[best], runs[best], logprobs=own.logprobs, stops=stops)
                    for index, best in enumerate(choices_in(request, own).best(collected))
                ],
            )
            made = _with_prompt_logprobs(made, request, runs, own)
            on_output(made)
            return made

        return await self._run_all(await valid_completions(context, prompts, params), output)

    async def _run_all(
        self,
        requests: AsyncGenerator[ValidRequest, None],
        output: Callable[[int, ValidRequest], Coroutine[Any, Any, RequestOutput]],
    ) -> list[RequestOutput]:
        """Start ``output`` of each request as it comes. The first error ends all of them."""
        tasks = list[asyncio.Task[RequestOutput]]()
        try:
            async with asyncio.TaskGroup() as group, aclosing(requests):
                async for request in requests:
                    await self._turns.acquire()
                    task = group.create_task(output(len(tasks), request))
                    # Also if it is cancelled before it has begun.
                    task.add_done_callback(lambda _: self._turns.release())
                    tasks.append(task)
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        return [task.result() for task in tasks]

    async def stream(
        self, prompt: PlainPrompt, params: SamplingParams, adapter: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the parts of the outputs of one prompt as they come."""
        async for made in await self.submitted(prompt, params, adapter):
            yield made

    async def submitted(
        self, prompt: PlainPrompt, params: SamplingParams, adapter: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check a prompt; return what runs it when it is first asked for a part, and yields the parts of its outputs.

        The last part has the log probabilities of the prompt, if asked for.
        """
        context = self._context(adapter)
        with named_errors():
            request = await valid_completion(context, prompt, params)
            check_streamed(choices_in(request, params))
        stops = request.text.stops

        def part(index: int, run: Run, pieces: Sequence[Piece]) -> CompletionOutput:
            return completion_output(index, pieces, run, logprobs=params.logprobs, stops=stops)

        return self._parts(context, request, params, prompt, part)

    async def chat(
        self, conversations: Sequence[Messages], params: Sequence[SamplingParams], call: ChatCall, on_output: OnOutput
    ) -> list[RequestOutput]:
        """Answer all conversations. Nothing runs unless all of them are valid."""
        context = self._context(call.adapter)
        chats = await valid_chats(context, conversations, params, call)

        async def output(number: int) -> RequestOutput:
            chat, own = chats[number], params[number]
            async with self._turns:
                with self._started(context, chat.request, own) as (runs, check):
                    wholes = await read_whole([chat.output(run) for run in runs])
                    check()
            outputs = [
                chat_output(index, whole, logprobs=own.logprobs) for index, whole in enumerate(chat.best(wholes))
            ]
            made = replace(self._output(None, chat.request, runs, outputs), left_out=_left_out(chat))
            on_output(made)
            return made

        return await together([output(number) for number in range(len(chats))])

    async def stream_chat(
        self, messages: Messages, params: SamplingParams, call: ChatCall
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the parts of the answers to one conversation as they come."""
        context = self._context(call.adapter)
        with named_errors():
            chat = await valid_chat(context, messages, params, call)
            check_streamed(chat.choices)
        readers: dict[int, ChatParts] = {}

        def part(index: int, run: Run, pieces: Sequence[Piece]) -> CompletionOutput:
            if index not in readers:
                readers[index] = ChatParts(index, chat.output(run), logprobs=params.logprobs)
            return readers[index].push(pieces)

        left_out = _left_out(chat)
        async for made in self._parts(context, chat.request, params, None, part):
            yield replace(made, left_out=left_out) if left_out else made

    @contextmanager
    def _started(
        self, context: Context, request: ValidRequest, params: SamplingParams
    ) -> Iterator[tuple[list[Run], Callable[[], None]]]:
        """Run a request; yield its runs, and what raises LogitsProcessorError. Call that before a token is used."""
        assert self._opened is not None
        registry = self._opened.shard.processors
        with (
            named_errors(),
            _processing(registry, request, params) as (processed, check),
            started(context.served, [processed], time.monotonic(), NO_TRACE) as runs,
        ):
            yield runs, check

    async def _parts(
        self,
        context: Context,
        request: ValidRequest,
        params: SamplingParams,
        prompt: PlainPrompt | None,
        part: Callable[[int, Run, Sequence[Piece]], CompletionOutput],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield each part of each output."""
        request_id = self._next_id()
        arrived: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        with self._started(context, request, params) as (runs, check):

            async def send(index: int, run: Run) -> None:
                async for ready in run:
                    check()
                    made = part(index, run, [piece for pieces in ready for piece in pieces])
                    finished = all(run.finish is not None for run in runs)
                    output = self._output(prompt, request, runs, [made])
                    if finished:
                        output = _with_prompt_logprobs(output, request, runs, params)
                    arrived.put_nowait(replace(output, request_id=request_id, finished=finished))

            sending = asyncio.create_task(on_all(runs, send))
            sending.add_done_callback(lambda _: arrived.put_nowait(None))
            try:
                while (ready := await arrived.get()) is not None:
                    yield ready
                await sending
            finally:
                await cancelled(sending)

    async def apply_chat_template(self, messages: Messages, fields: Mapping[str, Any], *, begins_reply: bool) -> str:
        """Return the prompt of a conversation as text."""
        context = self._context()
        with named_errors():
            body = chat_body(messages, CHAT_PARAMS, {**fields, "add_generation_prompt": begins_reply})
            plan = chat_plan_of(context, body, constrained=False)
            return (await chat_prompt_of(context, plan)).text

    @property
    def default_params(self) -> SamplingParams:
        """What is sampled with unless a call sets it."""
        given: dict[str, Any] = dict(self._context().model.request_defaults)
        return SamplingParams(**given)

    @property
    def fingerprint(self) -> str:
        """A text that differs between model files."""
        return self._context().model.fingerprint

    async def embed(self, prompts: Sequence[PlainPrompt]) -> list[EmbeddingRequestOutput]:
        """Return a vector for each text."""
        context, texts = self._context(), list[tuple[int, ...]]()

        async def texts_of(_context: Context) -> list[tuple[int, ...]]:
            texts.extend(await each(prompts, partial(embedded_ids, context)))
            return texts

        with named_errors():
            made = await vectors_in(context, texts_of)
        return [
            EmbeddingRequestOutput(
                request_id=self._next_id(), prompt_token_ids=list(text), outputs=EmbeddingOutput(list(vector))
            )
            for text, vector in zip(texts, made.vectors, strict=True)
        ]

    async def score(self, first: Sequence[str], second: Sequence[str]) -> list[ScoringRequestOutput]:
        """Return a score for each pair."""
        context = self._context()
        if 1 not in (len(first), len(second)) and len(first) != len(second):
            raise errors.RequestError(
                f"there must be as many texts on both sides, or one on one of them. Given: "
                f"{len(first)} and {len(second)}"
            )

        async def embed(texts_of: TextsOf) -> Vectors:
            return await vectors_in(context, texts_of, for_scores=True)

        with named_errors():
            made = await scores_of(embed, Texts("data_1", first), Texts("data_2", second))
        return [ScoringRequestOutput(request_id=self._next_id(), outputs=ScoringOutput(one)) for one in made.values]

    async def decide(self, given: Any, questions: Any, *, average_orders: bool) -> Decision:
        """Answer questions about one input."""
        context = self._context()
        with named_errors():
            asked = AskedDecision(decision_body(given, questions, average_orders=average_orders))
            context.check_generates()
            reply = await asked.validate(context)
            async with self._turns:
                with started(context.served, reply.requests, time.monotonic(), NO_TRACE) as runs:
                    return await reply.decision(runs)

    async def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Return the token ids of ``text``."""
        with named_errors():
            return list((await self._context().engine.queries.tokenize(text, add_special=add_special)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without control tokens."""
        context = self._context()
        if not token_ids:
            return ""
        with named_errors():
            check_token_ids("token_ids", token_ids, context.model.max_tokenize_bytes, context.model)
            found = await context.engine.queries.detokenize(token_ids)
        pieces = zip(found.pieces, found.specials, strict=True)
        return b"".join(piece for piece, special in pieces if not special).decode("utf-8", "replace")

    def _output(
        self,
        prompt: PlainPrompt | None,
        request: ValidRequest,
        runs: Sequence[Run],
        outputs: Sequence[CompletionOutput],
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._next_id(),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(request.prompt) if request.specs[0].media is None else text_ids(request.prompt),
            outputs=outputs,
            finished=True,
            num_prompt_tokens=len(request.prompt),
            num_cached_tokens=runs[0].cached_tokens,
        )

    def _next_id(self) -> str:
        return str(next(self._request_ids))


def _with_prompt_logprobs(
    output: RequestOutput, request: ValidRequest, runs: Sequence[Run], params: SamplingParams
) -> RequestOutput:
    if params.prompt_logprobs is None or request.prompt_text is None:
        return output
    told = prompt_logprobs(request.prompt_text, runs[0].prompt_logprobs, params.prompt_logprobs)
    return replace(output, prompt_logprobs=told)


def _left_out(chat: ValidChat) -> Sequence[int]:
    return () if chat.left_out is None else chat.left_out.messages


@contextmanager
def _processing(
    registry: ProcessorRegistry, request: ValidRequest, params: SamplingParams
) -> Iterator[tuple[ValidRequest, Callable[[], None]]]:
    """Yield the request as it is to run, and what raises LogitsProcessorError once a function has failed.

    A token that was chosen without the functions comes after that: call it before a token is used.
    """
    if not params.logits_processors:
        yield request, lambda: None
        return
    with registry.registered(params.logits_processors) as (key, processors):

        def check() -> None:
            if processors.error is not None:
                raise errors.LogitsProcessorError.of(processors.error)

        specs = tuple(replace(spec, sampling=replace(spec.sampling, processors=key)) for spec in request.specs)
        yield replace(request, specs=specs), check


def _server_type() -> "type[LocalServer]":
    """Import the server, which needs packages that a model does not. Raises ServerError if one is missing."""
    if lacking := lack(Part.ROUTER):
        raise errors.ServerError(f"a server {lacking}")
    from caravan.local_server import LocalServer

    return LocalServer
