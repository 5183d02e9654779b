"""A model in this process: a shard, and the router's engine over it, on one event loop, without HTTP and gRPC."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from caravan import errors
from caravan.local_channel import LocalChannel
from caravan.options import split_options
from caravan.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from caravan.prompts import PlainPrompt
from caravan.replies import ChatParts, chat_output, completion_output, prompt_logprobs
from caravan.request_bodies import chat_body, completion_body
from caravan.sampling_params import SamplingParams
from caravan_proto.flags import from_values
from caravan_router.auth.key import NO_KEY
from caravan_router.chat.template_renderer import TemplateRenderer
from caravan_router.config import RouterConfig
from caravan_router.core.errors import DeadlineError, EngineError
from caravan_router.core.trace import NO_TRACE
from caravan_router.engine.discovery import Address
from caravan_router.engine.fleet import Fleet
from caravan_router.engine.link import LinkConfig
from caravan_router.http.generation.bounds import bounds_of
from caravan_router.http.generation.context import Context, Sender
from caravan_router.http.generation.models import ServedModel
from caravan_router.http.generation.prompt import check_token_ids, tokenize_prompt
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run, collect, on_all, started, together
from caravan_router.http.limits import Limits
from caravan_router.http.openai.chat.reply import read_whole
from caravan_router.http.openai.chat.validation import ChatSource, ValidChat, validate_chat
from caravan_router.http.openai.completions.validation import completion_plan_of, validate_completion
from caravan_router.http.openai.embeddings.vectors import TextsOf, Vectors, vectors_in
from caravan_router.http.openai.sampling import choices_of
from caravan_router.http.openai.scoring.scores import Texts, scores_of
from caravan_router.http.server.errors import RequestError
from caravan_router.metrics.recorder import Metrics
from caravan_router.text.assembler import Piece
from caravan_shard.backends.base import StartupError
from caravan_shard.checks.sampling import MAX_TOP_N_TOKENS
from caravan_shard.config import ShardConfig
from caravan_shard.service.loaded_shard import LoadedShard

_ADDRESS = "unix:this-process"
# Shard and router live and end together, so neither gives the other up.
_NEVER_S = 86_400.0
_SETTLE_S = 5.0
# More generations wait outside the scheduler, which looks at all that wait inside.
_MAX_SUBMITTED = 256
_MAX_CANDIDATES = 256
_MAX_STOPS = 64


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a `LocalModel` has between `open` and `close`."""

    fleet: Fleet
    templates: TemplateRenderer
    closing: AsyncExitStack


class LocalModel:
    """Create it, `open` it, and finally `close` it, all on one event loop. Every call raises the package's errors."""

    def __init__(self, model: str | Path, options: Mapping[str, Any]) -> None:
        """Raises TypeError or ValueError if an option is unknown or wrong."""
        of_model, of_engine = split_options(model, options)
        self._shard_config = from_values(ShardConfig, of_model)
        self._router_config = from_values(RouterConfig, of_engine)
        self._limits = Limits(
            max_best_of=_MAX_CANDIDATES,
            max_stop_sequences=_MAX_STOPS,
            max_top_n_tokens=MAX_TOP_N_TOKENS,
            max_draft_tokens=self._router_config.speculate,
        )
        self._metrics = Metrics()
        self._request_ids = itertools.count()
        self._turns = asyncio.Semaphore(_MAX_SUBMITTED)
        self._opened: _Opened | None = None

    async def open(self) -> None:
        """Load the model. Raises ModelError."""
        shard = LoadedShard(self._shard_config)
        try:
            await shard.start()
        except StartupError as error:
            raise errors.ModelError(str(error)) from None
        async with AsyncExitStack() as closing:
            closing.push_async_callback(shard.stop)
            fleet, templates = self._start_engine(shard, closing)
            await fleet.wait_until_ready()
            self._opened = _Opened(fleet, templates, closing.pop_all())

    def _start_engine(self, shard: LoadedShard, closing: AsyncExitStack) -> tuple[Fleet, TemplateRenderer]:
        link = LinkConfig(
            router_id="this-process",
            lease_ttl_s=_NEVER_S,
            silence_s=_NEVER_S,
            step_timeout_s=_NEVER_S,
            wants_drafts=self._router_config.speculate > 0,
            open_channel=lambda _address: LocalChannel(shard.servicer),
        )
        fleet = Fleet((Address(_ADDRESS),), self._router_config.scheduler, link, self._metrics.of)
        templates = TemplateRenderer()
        closing.push_async_callback(templates.close)
        running = asyncio.create_task(fleet.run())
        closing.push_async_callback(_cancelled, running)
        if self._shard_config.cache_dir:
            # What the shard keeps of ended sequences is saved to files. In memory it would end with the shard.
            closing.push_async_callback(fleet.settle, _SETTLE_S)
        return fleet, templates

    async def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.closing.aclose()

    def _context(self, adapter: str = "") -> Context:
        if self._opened is None:
            raise errors.ClosedError("the model is closed")
        engine = self._opened.fleet.engine("")
        assert engine is not None
        facts = engine.model
        if adapter and adapter not in facts.adapters:
            raise errors.RequestError(f"there is no adapter {adapter!r}")
        return Context(
            sender=Sender(key=NO_KEY, headers={}),
            limits=self._limits,
            templates=self._opened.templates,
            served=ServedModel(engine, self._metrics.of(facts.name)),
            model=facts,
            adapter=adapter,
            bounds=bounds_of(self._limits, facts),
        )

    async def generate(
        self,
        prompts: Sequence[PlainPrompt],
        params: Sequence[SamplingParams],
        adapter: str,
        on_output: Callable[[RequestOutput], None],
    ) -> list[RequestOutput]:
        """Generate for all prompts, each with its own parameters. Nothing runs unless all of them are valid."""
        context = self._context(adapter)
        valid = []
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            with _named_errors("" if len(prompts) == 1 else f"prompt {number}: "):
                valid.append(await _valid_completion(context, prompt, own))

        async def output(number: int) -> RequestOutput:
            request, own = valid[number], params[number]
            async with self._turns:
                with _named_errors(), started(context.served, [request], time.monotonic(), NO_TRACE) as runs:
                    collected = await collect(runs)
            stops = request.text.stops
            made = self._output(
                prompts[number],
                request,
                runs,
                [
                    completion_output(index, pieces, run, logprobs=own.logprobs, stops=stops)
                    for index, (pieces, run) in enumerate(zip(collected, runs, strict=True))
                ],
            )
            if own.prompt_logprobs is not None and request.prompt_text is not None:
                told = prompt_logprobs(request.prompt_text, runs[0].prompt_logprobs, own.prompt_logprobs)
                made = replace(made, prompt_logprobs=told)
            on_output(made)
            return made

        return await together([output(number) for number in range(len(valid))])

    async def stream(
        self, prompt: PlainPrompt, params: SamplingParams, adapter: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the parts of the outputs of one prompt as they come."""
        context = self._context(adapter)
        with _named_errors():
            request = await _valid_completion(context, prompt, params)
        stops = request.text.stops

        def part(index: int, run: Run, pieces: Sequence[Piece]) -> CompletionOutput:
            return completion_output(index, pieces, run, logprobs=params.logprobs, stops=stops)

        async for made in self._parts(context, request, prompt, part):
            yield made

    async def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        params: Sequence[SamplingParams],
        options: Mapping[str, Any],
        adapter: str,
        on_output: Callable[[RequestOutput], None],
    ) -> list[RequestOutput]:
        """Answer all conversations. Nothing runs unless all of them are valid."""
        context = self._context(adapter)
        chats = []
        for number, (messages, own) in enumerate(zip(conversations, params, strict=True)):
            with _named_errors("" if len(conversations) == 1 else f"conversation {number}: "):
                chats.append(await _valid_chat(context, messages, own, options))

        async def output(number: int) -> RequestOutput:
            chat, own = chats[number], params[number]
            async with self._turns:
                with _named_errors(), started(context.served, [chat.request], time.monotonic(), NO_TRACE) as runs:
                    wholes = await read_whole(runs, chat)
            outputs = [chat_output(index, whole, logprobs=own.logprobs) for index, whole in enumerate(wholes)]
            made = self._output(None, chat.request, runs, outputs)
            on_output(made)
            return made

        return await together([output(number) for number in range(len(chats))])

    async def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        options: Mapping[str, Any],
        adapter: str,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the parts of the answers to one conversation as they come."""
        context = self._context(adapter)
        with _named_errors():
            chat = await _valid_chat(context, messages, params, options)
        readers: dict[int, ChatParts] = {}

        def part(index: int, run: Run, pieces: Sequence[Piece]) -> CompletionOutput:
            if index not in readers:
                readers[index] = ChatParts(index, chat.output(), run, logprobs=params.logprobs)
            return readers[index].push(pieces)

        async for made in self._parts(context, chat.request, None, part):
            yield made

    async def _parts(
        self,
        context: Context,
        request: ValidRequest,
        prompt: PlainPrompt | None,
        part: Callable[[int, Run, Sequence[Piece]], CompletionOutput],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield each part of each output."""
        request_id = self._next_id()
        arrived: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        with _named_errors(), started(context.served, [request], time.monotonic(), NO_TRACE) as runs:

            async def send(index: int, run: Run) -> None:
                async for ready in run:
                    made = part(index, run, [piece for pieces in ready for piece in pieces])
                    finished = all(run.finish is not None for run in runs)
                    output = self._output(prompt, request, runs, [made])
                    arrived.put_nowait(replace(output, request_id=request_id, finished=finished))

            sending = asyncio.create_task(on_all(runs, send))
            sending.add_done_callback(lambda _: arrived.put_nowait(None))
            try:
                while (ready := await arrived.get()) is not None:
                    yield ready
                await sending
            finally:
                await _cancelled(sending)

    async def embed(self, prompts: Sequence[PlainPrompt]) -> list[EmbeddingRequestOutput]:
        """Return a vector for each text."""
        context, texts = self._context(), list[tuple[int, ...]]()

        async def texts_of(_context: Context) -> list[tuple[int, ...]]:
            texts.extend([await _embedded_ids(context, prompt) for prompt in prompts])
            return texts

        with _named_errors():
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

        with _named_errors():
            made = await scores_of(embed, Texts("data_1", first), Texts("data_2", second))
        return [ScoringRequestOutput(request_id=self._next_id(), outputs=ScoringOutput(one)) for one in made.values]

    async def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Return the token ids of ``text``."""
        with _named_errors():
            return list((await self._context().engine.queries.tokenize(text, add_special=add_special)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without control tokens."""
        context = self._context()
        if not token_ids:
            return ""
        with _named_errors():
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
            prompt_token_ids=list(request.prompt),
            outputs=outputs,
            finished=True,
            num_cached_tokens=runs[0].cached_tokens,
        )

    def _next_id(self) -> str:
        return str(next(self._request_ids))


async def _valid_completion(context: Context, prompt: PlainPrompt, params: SamplingParams) -> ValidRequest:
    if params.max_tokens is None:
        if isinstance(prompt, str):
            ids = (await tokenize_prompt(context.engine, "prompt", prompt, context.bounds)).token_ids
        else:
            ids = prompt
        max_tokens = max(1, context.bounds.max_total_tokens - len(ids))
    else:
        max_tokens = params.max_tokens
    body = completion_body(prompt, params, max_tokens)
    (request,) = await validate_completion(context, body, completion_plan_of(body, context.limits))
    return request


async def _valid_chat(
    context: Context, messages: Sequence[Mapping[str, Any]], params: SamplingParams, options: Mapping[str, Any]
) -> ValidChat:
    body = chat_body(messages, params, options)
    return await validate_chat(context, ChatSource(body=body), choices_of(body, context.limits))


async def _embedded_ids(context: Context, prompt: PlainPrompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        prompt = (await tokenize_prompt(context.engine, "input", prompt, context.bounds)).token_ids
    check_token_ids("input", prompt, context.model.max_embed_tokens, context.model)
    return prompt


async def _cancelled(task: "asyncio.Task[None]") -> None:
    """Cancel ``task`` and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task})


@contextmanager
def _named_errors(prefix: str = "") -> Iterator[None]:
    """Turn the errors of the router's layers into those of this package."""
    try:
        yield
    except RequestError as error:
        raise errors.RequestError(prefix + str(error).removeprefix("Input validation error: ")) from None
    except errors.RequestError as error:
        raise errors.RequestError(f"{prefix}{error}") from None
    except DeadlineError as error:
        raise errors.DeadlineError(str(error)) from None
    except EngineError as error:
        raise errors.GenerationError(str(error)) from None
