"""Calls that touch no sequence: tokenizing, detokenizing, compiling constraints, embedding. Any shard answers them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from caravan_dialects.ahead import ahead, each
from caravan_proto.errors import ShardError
from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.model import TokenizedText
from caravan_router.engine.absence import Absence
from caravan_router.engine.link import ShardLink
from caravan_router.engine.media import MediaShelf, parts_of
from caravan_router.engine.replicas import Replicas
from caravan_router.engine.shard_calls import ShardCalls, ShardRpcError
from caravan_router.engine.text_gate import TextGate, TextLanes
from caravan_scheduler.core.engine import ANY_SENDER, TextSender
from caravan_scheduler.core.errors import EngineError, GenerationError, HelperError, NoShardError, TextTooLongError
from caravan_scheduler.core.groups import Most, grouped
from caravan_scheduler.core.media import MediaPrompt
from caravan_scheduler.core.prompt_media import MediaTokens, media_tokens_of
from caravan_scheduler.text_load import TextLoad
from caravan_scheduler.waiting.text_queue import TextQueue, room_of

_T = TypeVar("_T")

# While no shard is up, every waiting request looks for one this often.
_POLL_S = 0.1
# What a shard computes in one forward pass, if its flags leave it that much room.
_TEXTS_PER_CALL = 64
_TEXT_TOKENS_PER_CALL = 512
# Of the text of a token, about.
_BYTES_OF_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A shard's verdict on a constraint: ``problem`` is None if the shard can enforce it."""

    problem: str | None


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """A shard could not be asked, or could not find out; another may answer. ``checks``: it was asked."""

    reason: str
    checks: bool = False


class ShardQueries:
    """Asks those of ``replicas`` that are up; while none is, a call waits for one as ``absence`` says.

    ``absence`` may change. ``load`` returns how many sequences the shard at an address holds. ``texts`` is told what is
    embedded.
    """

    def __init__(
        self, replicas: Replicas, load: Callable[[str], int], absence: Absence, aging_s: float, texts: TextLoad
    ) -> None:
        self._replicas = replicas
        self._load = load
        self._shelf = MediaShelf()
        self.absence = absence
        self._text_load = texts
        self._texts = TextGate(TextQueue(aging_s), self._text_room, texts)
        self._lanes = TextLanes(aging_s, lambda: len(self._clients()))
        # Is told of the texts, as token ids, that were embedded for the API key of a name.
        self.on_embedded: Callable[[str, Sequence[tuple[int, ...]]], None] = lambda _key, _texts: None
        # Calls that wait for a shard.
        self.waiting = 0
        # Whose shards are asked instead, and why none will ever answer.
        self._successor: ShardQueries | None = None
        self._ended: EngineError | None = None

    def follow(self, successor: "ShardQueries") -> None:
        """Ask the shards of ``successor`` from now on, whose vocabulary is the same."""
        self._successor = successor

    def end(self, error: EngineError) -> None:
        """Let all calls that wait, and those to come, fail with ``error``."""
        self._ended = error

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> TokenizedText:
        """Return the tokens of ``text``; with ``parse_special``, the text of a control token becomes that token."""
        return await self._tokenize(
            lambda client: client.tokenize(text, add_special=add_special, parse_special=parse_special), _size(text)
        )

    async def tokenize_texts(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[tuple[int, ...]]:
        """Return the token ids of each text as `tokenize` does."""
        return await self._token_ids(
            texts,
            _size,
            lambda client, together: client.tokenize_texts(
                together, add_special=add_special, parse_special=parse_special
            ),
        )

    async def tokenize_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[int, ...]]:
        """Return the token ids of each pair of a query and a document as a model that ranks reads it."""
        return await self._token_ids(
            pairs, lambda pair: sum(map(_size, pair)), lambda client, together: client.tokenize_pairs(together)
        )

    async def _token_ids(
        self,
        items: Sequence[_T],
        size_of: Callable[[_T], int],
        call: Callable[[ShardCalls, Sequence[_T]], Awaitable[list[tuple[int, ...]]]],
    ) -> list[tuple[int, ...]]:
        """Tokenize ``items`` in calls of as many as a shard takes at a time."""

        async def ask(together: Sequence[_T]) -> list[tuple[int, ...]]:
            return await self._tokenize(lambda client: call(client, together), sum(map(size_of, together)))

        groups = list(
            grouped(items, Most(items=_TEXTS_PER_CALL, size=self._replicas.facts.max_tokenize_bytes), size_of)
        )
        return [ids for found in await each(groups, ask) for ids in found]

    async def tokenize_parts(
        self, parts: MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> MediaTokens:
        """Return the tokens of a prompt of texts and media, for the model's projector.

        Adjacent texts are tokenized separately. Raises TooMuchMediaError.
        """
        facts = self._replicas.facts.media
        assert facts is not None, "the model reads neither images nor audio"
        kept = self._shelf.kept(parts)
        asked = parts_of(kept, add_special=add_special, parse_special=parse_special)
        tokenized = await self._tokenize(
            lambda client: client.tokenize_parts(asked),
            sum(_size(part) for part in kept if isinstance(part, str)),
            facts.fingerprint,
        )
        return media_tokens_of(tokenized, [part for part in kept if not isinstance(part, str)], facts)

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        """Return the pieces of ``token_ids``."""
        return await self._tokenize(lambda client: client.detokenize(token_ids), _BYTES_OF_TOKEN * len(token_ids))

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        """Compile ``constraint`` on every shard that is up, since its sequence may run on any; return what is wrong.

        If all of them go away meanwhile, wait for others. Raises HelperError if none of them can find out.
        """
        began_s = time.monotonic()
        failure = self._no_shard()
        while True:
            answers = await asyncio.gather(*(_compile(client, constraint) for client in self._clients()))
            problems = [answer.problem for answer in answers if isinstance(answer, _Compiled)]
            if problems:
                return next((problem for problem in problems if problem is not None), None)
            for answer in answers:
                if isinstance(answer, _Unanswered):
                    if answer.checks:
                        raise HelperError("Constraints cannot be checked at present")
                    failure = self._no_shard(answer.reason)
            await self._pause(began_s, failure)

    async def embed(self, texts: Sequence[tuple[int, ...]], sender: TextSender = ANY_SENDER) -> list[tuple[float, ...]]:
        """Return a vector for each text, in calls of as many texts as a shard may compute in one forward pass.

        A request has as many calls at a time as fill the shards, and the calls of others take turns with its own. Calls
        wait here until a shard can soon compute them.
        """

        async def embed(together: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
            async with self._texts.passing(sum(map(len, together)), sender):
                return await self._ask_any(
                    lambda client: self._embed_at(client, together), lambda client: client.embedding.texts
                )

        calls = list(grouped(texts, Most(items=_TEXTS_PER_CALL, size=_TEXT_TOKENS_PER_CALL), len))
        if len(calls) == 1:
            # Most requests have few texts, which need no task.
            vectors = await embed(calls[0])
        else:
            at_once = max(1, self._text_room() // _TEXT_TOKENS_PER_CALL)
            vectors = [vector async for made in ahead(calls, embed, at_once) for vector in made]
        self.on_embedded(sender.tenant.name, texts)
        return vectors

    async def _embed_at(self, client: ShardCalls, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Let the shard of ``client`` embed ``texts``, and learn what that takes."""
        computed = 0
        self._text_load.begin(client, time.monotonic())
        try:
            vectors = await client.embed(texts)
            computed = sum(map(len, texts))
            return vectors
        finally:
            self._text_load.end(client, computed, time.monotonic())

    def _text_room(self) -> int:
        """Return how many tokens of texts the shards that are up may have."""
        if self._successor is not None:
            return self._successor._text_room()
        infos = [link.info for link in self._replicas.links.values() if link.client is not None]
        return sum(room_of(info.embed_tokens_at_once) for info in infos if info is not None)

    def _no_shard(self, reason: str = "") -> NoShardError:
        return self.absence.error(self._replicas.facts.name, reason)

    async def _pause(self, began_s: float, failure: NoShardError) -> None:
        """Wait before the shards are asked again.

        Raises ``failure`` if that has been tried for long enough, or why nobody will answer.
        """
        if self._successor is not None:
            await self._successor._pause(began_s, failure)
            return
        if self._ended is not None:
            raise self._ended
        if time.monotonic() - began_s >= self.absence.grace_s:
            raise failure
        self.waiting += 1
        try:
            await asyncio.sleep(_POLL_S)
        finally:
            self.waiting -= 1

    def _clients(self, encoder: bytes = b"") -> list[ShardCalls]:
        """Return the clients of the shards that are up, the one with the fewest sequences first.

        ``encoder``: the fingerprint of the projector that they must have, if it is not empty.
        """
        if self._successor is not None:
            return self._successor._clients(encoder)
        links = sorted(self._replicas.links.values(), key=lambda link: self._load(link.address))
        return [link.client for link in links if link.client is not None and (not encoder or _has(link, encoder))]

    async def _tokenize(self, call: Callable[[ShardCalls], Awaitable[_T]], size: int, encoder: bytes = b"") -> _T:
        """Ask the shard that tokenizes the fewest texts, so that those of one request are spread over the shards.

        ``size``: bytes of text. ``encoder``: see `_clients`.
        """
        began_s = time.monotonic()
        while True:
            async with self._lanes.passing(size):
                answer = await _first(call, sorted(self._clients(encoder), key=lambda client: client.tokenizing.texts))
            if not isinstance(answer, _Unanswered):
                return answer
            await self._pause(began_s, self._no_shard(answer.reason))

    async def _ask_any(self, call: Callable[[ShardCalls], Awaitable[_T]], busy: Callable[[ShardCalls], int]) -> _T:
        """Ask the shard that is least ``busy``, and of those the one with the fewest sequences.

        If it goes away meanwhile, ask the next one.
        """
        began_s = time.monotonic()
        while True:
            answer = await _first(call, sorted(self._clients(), key=busy))
            if not isinstance(answer, _Unanswered):
                return answer
            await self._pause(began_s, self._no_shard(answer.reason))


async def _first(call: Callable[[ShardCalls], Awaitable[_T]], clients: Iterable[ShardCalls]) -> _T | _Unanswered:
    """Return what the first of ``clients`` answers that can be asked. Raises TextTooLongError, GenerationError."""
    reason = ""
    for client in clients:
        try:
            return await call(client)
        except ShardRpcError as error:
            if error.error is ShardError.TEXT_TOO_LONG:
                raise TextTooLongError(str(error)) from None
            if error.error is not None and error.error is not ShardError.DRAINING:
                raise GenerationError(str(error)) from None
            reason = str(error)
    return _Unanswered(reason)


def _size(text: str) -> int:
    """Return the number of bytes."""
    return len(text.encode())


def _has(link: ShardLink, encoder: bytes) -> bool:
    """Whether the shard has said that it has the projector of this fingerprint."""
    return link.info is not None and link.info.limits.encoder == encoder


async def _compile(client: ShardCalls, constraint: Constraint) -> _Compiled | _Unanswered:
    try:
        return _Compiled(await client.compile_constraint(constraint))
    except ShardRpcError as error:
        if error.error not in {None, ShardError.DRAINING, ShardError.CHECK_FAILED}:
            raise GenerationError(str(error)) from None
        return _Unanswered(str(error), checks=error.error is ShardError.CHECK_FAILED)
