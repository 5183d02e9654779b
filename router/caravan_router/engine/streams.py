"""The tokens of one request, between the batcher and the handler that sends them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caravan_proto.messages.results import DraftCount, DraftSource
from caravan_scheduler.actions import Start
from caravan_scheduler.core.engine import StreamTimes
from caravan_scheduler.core.errors import EngineError
from caravan_scheduler.core.generation import GenerationState, Standing
from caravan_scheduler.core.tokens import GeneratedToken, PromptToken
from caravan_scheduler.core.trace import GenerationTrace

if TYPE_CHECKING:
    from caravan_scheduler.core.recomputed import Recomputed


@dataclass(frozen=True, slots=True)
class RequestInBatch:
    """The request of a stream. ``close`` releases its sequence, ``end_thought`` ends its thought, ``call_tools`` says
    that its answer calls tools, and ``standing`` says where it is until it has ended.
    """

    close: Callable[[], None]
    end_thought: Callable[[], None]
    call_tools: Callable[[], None]
    standing: Callable[[], Standing]


class RequestStream:
    """A queue with one producer, the batcher, and one consumer. It holds at most the tokens of the whole request."""

    def __init__(self, request: RequestInBatch, trace: GenerationTrace) -> None:
        self._request = request
        # Not read yet.
        self._tokens: list[GeneratedToken] = []
        self._error: EngineError | None = None
        self._ended = False
        self._closed = False
        # The future that the consumer awaits; None while it does not wait.
        self._waiter: asyncio.Future[None] | None = None
        self._submitted = time.monotonic()
        self._started: float | None = None
        self._first_token: float | None = None
        self.trace = trace
        self._numerics = ""
        self._start: Start | None = None
        self.prompt_logprobs: list[PromptToken] = []
        self._drafts: dict[DraftSource, DraftCount] = {}

    @property
    def state(self) -> GenerationState:
        """The stage of the generation, such as queued or running."""
        return GenerationState.ENDED if self._ended or self._closed else self._request.standing().state

    @property
    def prompt_computed(self) -> int:
        """Number of prompt tokens that are computed so far, or did not need to be. 0 while the request waits."""
        return 0 if self._started is None or self._ended or self._closed else self._request.standing().computed

    @property
    def feedback(self) -> float | None:
        """What mirostat or adaptive-p carries to the next token; None without them, and after the end."""
        return None if self._ended or self._closed else self._request.standing().feedback

    @property
    def times(self) -> StreamTimes:
        """When the request was submitted, first sent to a shard, and got its first token."""
        return StreamTimes(self._submitted, self._started, self._first_token)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that did not need to be computed."""
        return 0 if self._start is None else self._start.cached_tokens

    @property
    def recomputed(self) -> "Recomputed | None":
        """Why prompt tokens did not come from the cache; None until the request has started."""
        return None if self._start is None else self._start.recomputed

    def start(self, start: Start, numerics: str) -> None:
        """Note that a shard starts the request, at the token after the cached ones.

        ``numerics``: the fingerprint of how the shard computes.
        """
        self._started = time.monotonic()
        self._numerics = numerics
        self._start = start
        self.trace.started(start.shard, start.cached_tokens, start.recomputed)

    def resume(self, shard: str, computed_again: int, numerics: str) -> None:
        """Note that a shard continues the request, and computes ``computed_again`` of its tokens once more."""
        before, self._numerics = self._numerics, numerics
        self.trace.resumed(shard, computed_again, other_numerics=before != numerics)

    @property
    def drafts(self) -> list[DraftCount]:
        """The draft tokens so far, of each source that had any."""
        return list(self._drafts.values())

    def note_drafts(self, count: DraftCount) -> None:
        """Note draft tokens of a step."""
        _, drafted, accepted = self._drafts.get(count.source, DraftCount(count.source, 0, 0))
        self._drafts[count.source] = DraftCount(count.source, drafted + count.drafted, accepted + count.accepted)

    def deliver(self, prompt_logprobs: tuple[PromptToken, ...], tokens: tuple[GeneratedToken, ...]) -> bool:
        """Append the next prompt logprobs and tokens. Return whether the last token ended the stream."""
        self.prompt_logprobs += prompt_logprobs
        if not tokens:
            return False
        if self._first_token is None:
            self._first_token = time.monotonic()
            self.trace.got_first_token()
        self._tokens += tokens
        self._ended = tokens[-1].finish is not None
        self._wake()
        return self._ended

    def fail(self, error: EngineError) -> None:
        """End the stream with ``error``, after the tokens that it has."""
        self._error = error
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        # It is done if the consumer was cancelled.
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def end_thought(self) -> None:
        """Let the thought end with the tokens that it has. After the end of the stream this does nothing."""
        if not (self._ended or self._closed):
            self._request.end_thought()

    def call_tools(self) -> None:
        """Let the scheduler expect another request soon, with the results of tools that the answer calls."""
        self._request.call_tools()

    def close(self) -> None:
        """Stop reading. Before the end this releases the sequence, afterwards it does nothing."""
        if not self._closed:
            self._closed = True
            if not self._ended:
                self._request.close()

    async def __aiter__(self) -> AsyncIterator[list[GeneratedToken]]:
        while True:
            while self._tokens:
                tokens, self._tokens = self._tokens, []
                yield tokens
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
