"""Calls that touch no sequence: tokenizing, detokenizing, compiling constraints, embedding. Any shard answers them."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from caravan_proto.errors import ShardError
from caravan_router.core.constraint import Constraint
from caravan_router.core.engine import TokenizedText
from caravan_router.core.errors import GenerationError, NoShardError, TextTooLongError
from caravan_router.engine.client import ShardClient, ShardRpcError
from caravan_router.engine.link import ShardLink

_T = TypeVar("_T")

# While no shard is up, every waiting request looks for one this often.
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A shard's verdict on a constraint: ``problem`` is None if the shard can enforce it."""

    problem: str | None


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """A shard could not be asked; another may answer."""

    reason: str


class ShardQueries:
    """Asks the shards that are up; while none is, a call waits ``grace_s`` for one.

    ``links`` may change. ``load`` returns how many sequences the shard at an address holds.
    """

    def __init__(self, links: Mapping[str, ShardLink], load: Callable[[str], int], grace_s: float) -> None:
        self._links = links
        self._load = load
        self._grace_s = grace_s

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> TokenizedText:
        """Return the tokens of ``text``; with ``parse_special``, the text of a control token becomes that token."""
        return await self._ask_any(
            lambda client: client.tokenize(text, add_special=add_special, parse_special=parse_special)
        )

    async def tokenize_pair(self, query: str, document: str) -> TokenizedText:
        """Return the tokens of a pair as a model that ranks reads it."""
        return await self._ask_any(lambda client: client.tokenize_pair(query, document))

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        """Return the pieces of ``token_ids``."""
        return await self._ask_any(lambda client: client.detokenize(token_ids))

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        """Compile ``constraint`` on every shard that is up, since its sequence may run on any; return what is wrong."""
        deadline = time.monotonic() + self._grace_s
        while not (clients := self._clients()):
            await _pause(deadline, NoShardError())
        answers = await asyncio.gather(*(_compile(client, constraint) for client in clients))
        problems = [answer.problem for answer in answers if isinstance(answer, _Compiled)]
        if not problems:
            raise NoShardError(next(answer.reason for answer in answers if isinstance(answer, _Unanswered)))
        return next((problem for problem in problems if problem is not None), None)

    async def embed(self, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Return a vector for each text. Each is a call of its own: decoding waits for a single text at most."""
        return [await self._ask_any(functools.partial(ShardClient.embed, text=text)) for text in texts]

    def _clients(self) -> list[ShardClient]:
        """Return the clients of the shards that are up, the one with the fewest sequences first."""
        links = sorted(self._links.values(), key=lambda link: self._load(link.address))
        return [link.client for link in links if link.client is not None]

    async def _ask_any(self, call: Callable[[ShardClient], Awaitable[_T]]) -> _T:
        """Ask the shard with the fewest sequences; if it goes away meanwhile, ask the next one."""
        deadline = time.monotonic() + self._grace_s
        failure = NoShardError()
        while True:
            for client in self._clients():
                try:
                    return await call(client)
                except ShardRpcError as error:
                    if error.error is ShardError.TEXT_TOO_LONG:
                        raise TextTooLongError(str(error)) from None
                    if error.error is not None and error.error is not ShardError.DRAINING:
                        raise GenerationError(str(error)) from None
                    failure = NoShardError(str(error))
            await _pause(deadline, failure)


async def _pause(deadline: float, failure: NoShardError) -> None:
    """Wait before the shards are asked again. Raises ``failure`` after ``deadline``."""
    if time.monotonic() >= deadline:
        raise failure
    await asyncio.sleep(_POLL_S)


async def _compile(client: ShardClient, constraint: Constraint) -> _Compiled | _Unanswered:
    try:
        return _Compiled(await client.compile_constraint(constraint))
    except ShardRpcError as error:
        return _Unanswered(str(error))
