"""A shard in this process, and the router's engine over it, without HTTP and gRPC."""

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self, TypeVar

from caravan import errors
from caravan.python_names import in_python
from caravan.server import Served
from caravan_dialects.chat.template_renderer import TemplateRenderer
from caravan_dialects.media.decoder import MediaDecoder
from caravan_proto.messages.adapters import AdapterSource, LoadedAdapter
from caravan_proto.messages.commands import Command, Decode
from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.media import EncodedMedia, PromptPart, TokenizedParts
from caravan_proto.messages.model import ShardClaim, ShardStatus, TokenizedText
from caravan_proto.messages.results import Holdings, LayoutSet, Loaded, Saved
from caravan_proto.wire import as_it_arrives, decode_note
from caravan_router.config import RouterConfig
from caravan_router.engine.discovery import Address
from caravan_router.engine.fleet import Fleet
from caravan_router.engine.link_config import LinkConfig
from caravan_router.engine.media import content_of, shape_of
from caravan_router.engine.shard_calls import Reply, ShardInfo, ShardRpcError, TextCount
from caravan_router.engine.step_columns import (
    alternatives_of,
    drafts_of,
    feedback_of,
    prompt_logprobs_of,
    tokens_of,
)
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.actions import Fetch
from caravan_scheduler.core.media import Media
from caravan_scheduler.events import SavedRun, Stepped
from caravan_shard.config import ShardConfig
from caravan_shard.engine.replies import Replies
from caravan_shard.named_models import with_model_files
from caravan_shard.protocol.results import KnownLogprobs, Refusal, Result, StepResult, TokenRows
from caravan_shard.service.calls import CallHandler
from caravan_shard.service.loaded_shard import LoadedShard
from caravan_shard.startup_error import StartupError

_T = TypeVar("_T")
_Columns = TypeVar("_Columns", TokenRows, KnownLogprobs)
_ADDRESS = "unix:this-process"
# Shard and router live and end together, so neither gives the other up.
_NEVER_S = 86_400.0
_SETTLE_S = 5.0
# Fast steps are reported together, as over the network: each report takes time of the thread that tokenizes.
_REPLY_INTERVAL_MS = 20
# Takes the bug by which an engine has ended.
OnFailure = Callable[[BaseException], None]


class LocalShard:
    """Hands calls to ``calls``, on one event loop. ``address`` names the shard in replies.

    ``reply_interval_ms``: a decode step that follows the last reply sooner is reported with the next step.
    """

    def __init__(self, address: str, calls: CallHandler, reply_interval_ms: int = 0) -> None:
        self._address = address
        self._reply_interval_ms = reply_interval_ms
        self._handler = calls
        # Those of commands that have not ended.
        self._open: set[Replies] = set()
        self._is_closed = False
        self.embedding, self.tokenizing = TextCount(), TextCount()

    @property
    def _calls(self) -> CallHandler:
        if self._is_closed:
            raise ShardRpcError(None, "the connection was closed")
        return self._handler

    async def close(self) -> None:
        """Cancel all commands."""
        self._is_closed = True
        for replies in self._open:
            replies.cancel()

    async def info(self) -> ShardInfo:
        """Return identity and limits."""
        return ShardInfo.of(self._calls.info())

    async def lease(
        self, router_id: str, epoch: int, ttl_s: float, claim: ShardClaim | None = None, url: str = ""
    ) -> None:
        """Take the shard with a new epoch, or keep it with the same one. ``claim``, ``url``: as in `ShardCalls`."""
        _accepted(self._calls.lease(router_id, epoch, ttl_s, claim, url))

    async def give_back(self, router_id: str, epoch: int) -> None:
        """End the lease."""
        _accepted(self._calls.give_back(router_id, epoch))

    async def drain(self, epoch: int) -> None:
        """Raise ShardRpcError: the shard ends with its program."""
        _accepted(self._calls.drain(epoch))

    async def fetch_runs(
        self, fetch: Fetch, epoch: int, source_epoch: int, source_hostname: str = ""
    ) -> tuple[bool, ...]:
        """Let the shard copy runs of another shard. Return for each run whether it is there now."""
        found = await self._calls.fetch_runs(fetch.source, source_hostname, source_epoch, fetch.keys, epoch)
        return tuple(_accepted(found))

    async def saved_runs(self) -> tuple[SavedRun, ...]:
        """Return the runs that the shard has saved."""
        return tuple(
            SavedRun(
                start=run.start,
                cuts=tuple(zip(run.cuts, run.keys, strict=True)),
                size_bytes=run.size,
                on_disk=on_disk,
                note=decode_note(run.note),
            )
            for run, on_disk in self._calls.list_runs()
        )

    async def load_adapter(self, source: AdapterSource, epoch: int) -> LoadedAdapter:
        """Let the shard load an adapter, until it is unloaded or the lease ends."""
        return _accepted(await self._calls.adapters.load(source, epoch))

    async def unload_adapter(self, key: str, epoch: int) -> None:
        """Let the shard free an adapter."""
        _accepted(await self._calls.adapters.unload(key, epoch))

    async def watch(self, interval_s: float, silence_s: float, epoch: int = 0) -> AsyncGenerator[ShardStatus, None]:
        """Yield the shard's status. It is never silent."""
        async with aclosing(self._calls.watch(interval_s, epoch)) as statuses:
            async for status in statuses:
                yield status

    async def start(self, command: Command, epoch: int) -> AsyncIterator[Sequence[Reply]]:
        """Queue ``command`` and return its replies."""
        if isinstance(command, Decode):
            command = replace(command, reply_interval_ms=self._reply_interval_ms)
        replies = _accepted(await self._calls.submit(as_it_arrives(command), epoch))
        self._open.add(replies)
        return self._replies(replies, command.command_id)

    async def _replies(self, replies: Replies, command_id: int) -> AsyncIterator[Sequence[Reply]]:
        try:
            while (results := await replies.next()) is not None:
                found = [reply for result in results if (reply := self._reply(result, command_id)) is not None]
                if found:
                    yield found
                _accepted(results[-1])
        finally:
            self._open.discard(replies)
            replies.cancel()

    def _reply(self, result: Result, command_id: int) -> Reply | None:
        match result:
            case StepResult():
                return _stepped(result, self._address, command_id)
            case Saved() | Loaded() | LayoutSet():
                return replace(result, shard=self._address, command_id=command_id)
            case Holdings() | Refusal():
                return None
            case _:
                raise AssertionError(f"{result} is no answer to a command of a router")

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool = True) -> TokenizedText:
        """Return the tokens of ``text``; with ``parse_special``, the text of a control token becomes that token."""
        with self.tokenizing.during(1):
            return _accepted(
                await self._calls.text.tokenize(text, add_special=add_special, parse_special=parse_special)
            )

    async def tokenize_texts(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[tuple[int, ...]]:
        """Return the token ids of each text as `tokenize` does."""
        with self.tokenizing.during(len(texts)):
            found = _accepted(
                await self._calls.text.tokenize_texts(texts, add_special=add_special, parse_special=parse_special)
            )
        return [*map(tuple, found)]

    async def tokenize_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[int, ...]]:
        """Return the token ids of each pair of a query and a document as a model that ranks reads it."""
        queries, documents = zip(*pairs, strict=True)
        with self.tokenizing.during(len(pairs)):
            found = _accepted(await self._calls.text.tokenize_pairs(queries, documents))
        return [*map(tuple, found)]

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        """Return the pieces of ``token_ids``."""
        return _accepted(await self._calls.text.detokenize(token_ids))

    async def tokenize_parts(self, parts: Sequence[PromptPart]) -> TokenizedParts:
        """Return the cells of a prompt of texts and media."""
        with self.tokenizing.during(1):
            return _accepted(await self._calls.media.tokenize(parts))

    async def encode_media(self, media: Media) -> EncodedMedia:
        """Encode a medium, unless the shard has its embeddings."""
        return _accepted(await self._calls.media.encode(shape_of(media), content_of(media)))

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        """Compile ``constraint``; return what is wrong with it, or None."""
        problem = _accepted(await self._calls.compile_constraint(constraint))
        return None if problem is None else problem.sentence

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the vector of each text, given as tokens."""
        with self.embedding.during(len(texts)):
            values = _accepted(await self._calls.embed([*chain.from_iterable(texts)], [*map(len, texts)]))
        size = len(values) // len(texts)
        return [tuple(values[start : start + size]) for start in range(0, len(values), size)]


def _accepted(answer: _T | Refusal) -> _T:
    """Return the answer to a call. Raises ShardRpcError if it was refused."""
    if isinstance(answer, Refusal):
        raise ShardRpcError(answer.error, f"{answer.error.status.name}: {answer.sentence}")
    return answer


def _stepped(result: StepResult, shard: str, command_id: int) -> Stepped:
    rows, prompt, evaluations, drafts = result.rows, result.prompt_logprobs, result.evaluations, result.drafts
    return Stepped(
        shard=shard,
        command_id=command_id,
        outcome=result.outcome,
        tokens=tokens_of(_rounded(rows), rows.finish_reasons),
        seconds=result.timings.total_ns / 1e9,
        forward_s=result.timings.forward_ns / 1e9,
        sample_s=result.timings.sample_ns / 1e9,
        prompt_logprobs=() if prompt is None else prompt_logprobs_of(_rounded(prompt)),
        drafts=() if drafts is None else drafts_of(drafts, drafts.sources),
        evaluations=()
        if evaluations is None
        else tuple(zip(evaluations.sequence_ids, alternatives_of(_rounded(evaluations)), strict=True)),
        feedback=feedback_of(rows),
        without_logits=tuple(rows.without_logits),
        missing_media=tuple(result.missing_media),
    )


def _rounded(columns: _Columns) -> _Columns:
    """Return the columns with log probabilities in float32."""
    if not columns.logprobs:
        return columns
    logprobs, top_logprobs = array("f", columns.logprobs).tolist(), array("f", columns.top_logprobs).tolist()
    return replace(columns, logprobs=logprobs, top_logprobs=top_logprobs)


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """What runs between `started` and `close`. ``servers``: those over the engine that have not ended."""

    shard: LoadedShard
    fleet: Fleet
    templates: TemplateRenderer
    decoder: MediaDecoder
    servers: set[Served]
    closing: AsyncExitStack

    @classmethod
    async def started(cls, shard: ShardConfig, router: RouterConfig, metrics: Metrics, on_failure: OnFailure) -> Self:
        """Load the model. ``on_failure`` is called if the engine fails, after which no call would end by itself.

        Raises ModelError.
        """
        try:
            shard = await with_model_files(shard)
            loaded = LoadedShard(shard)
            await loaded.start()
        except StartupError as error:
            raise errors.ModelError(in_python(str(error))) from None
        async with AsyncExitStack() as closing:
            closing.push_async_callback(loaded.stop)
            templates, decoder, servers = TemplateRenderer(), MediaDecoder(), set[Served]()
            closing.push_async_callback(templates.close)
            closing.push_async_callback(decoder.close)
            link = LinkConfig(
                router_id="this-process",
                lease_ttl_s=_NEVER_S,
                silence_s=_NEVER_S,
                step_timeout_s=_NEVER_S,
                wants_drafts=router.speculate > 0,
                connect=lambda address: LocalShard(address, loaded.calls, _REPLY_INTERVAL_MS),
                outlives_bugs=False,
            )
            fleet = Fleet((Address(_ADDRESS),), router.scheduler, link, metrics.of)
            running = asyncio.create_task(fleet.run())
            closing.push_async_callback(cancelled, running)
            closing.push_async_callback(cancelled, asyncio.create_task(_watch(running, servers, on_failure)))
            if shard.cache_dir:
                # What the shard keeps of ended sequences is saved to files. In memory it would end with the shard.
                closing.push_async_callback(fleet.settle, _SETTLE_S)
            await fleet.wait_until_ready()
            return cls(loaded, fleet, templates, decoder, servers, closing.pop_all())

    async def close(self) -> None:
        """End the servers and all that runs, and free the model."""
        await _cut(self.servers)
        await self.closing.aclose()


async def _watch(running: "asyncio.Task[None]", servers: set[Served], on_failure: OnFailure) -> None:
    """If the engine fails, say so and cut the servers, whose requests would wait for it for ever."""
    await asyncio.wait({running})
    failure = None if running.cancelled() else running.exception()
    if failure is None:
        return
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    on_failure(failure)
    await _cut(servers)


async def _cut(servers: set[Served]) -> None:
    await asyncio.gather(*(server.cut() for server in servers))


async def cancelled(task: "asyncio.Task[None]") -> None:
    """Cancel ``task`` and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task})
