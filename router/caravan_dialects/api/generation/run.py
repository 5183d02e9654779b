"""A validated request, and its generations from submission to the last token, with their accounting."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from caravan_dialects.api.error_table import kind_of
from caravan_dialects.api.errors import AbortedError
from caravan_dialects.api.generation.context import ServedModel
from caravan_dialects.text.assembler import Assembler, Piece, TextOptions
from caravan_dialects.text.detokenize import PromptText
from caravan_proto.messages.results import DraftCount, FinishReason
from caravan_scheduler.core.engine import StreamTimes, TokenStream
from caravan_scheduler.core.errors import ConstraintFailedError, DeadlineError, EngineError, IncompleteGenerationError
from caravan_scheduler.core.generation import GenerationSpec, GenerationState
from caravan_scheduler.core.recomputed import Recomputed
from caravan_scheduler.core.request_metrics import Failure, RequestTimings
from caravan_scheduler.core.tokens import GeneratedToken, PromptToken
from caravan_scheduler.core.trace import NO_TRACE, GenerationTrace, RequestTrace

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """One prompt: a generation for each candidate, and what the reply needs to know of the request.

    ``text``: how tokens become text. ``characters``: length of the prompt as the client wrote it. ``prompt_text``: set
    if the reply shows prompt tokens.
    """

    specs: tuple[GenerationSpec, ...]
    text: TextOptions
    characters: int
    prompt_text: PromptText | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt, which all candidates share."""
        return self.specs[0].prompt


class Run:
    """One generation. Entering submits it; leaving releases its sequence and counts it, even after an error.

    Iterating over it yields what is ready: an iterator over the lists of pieces that tokens release, which must be read
    to its end. The sequence is released as soon as a stop string matched, so that it gets no further step.
    """

    __slots__ = (
        "_arrived",
        "_assembler",
        "_last_token",
        "_model",
        "_stream",
        "_trace",
        "cut",
        "finish",
        "spec",
        "tokens",
    )

    _stream: TokenStream

    def __init__(
        self,
        model: ServedModel,
        spec: GenerationSpec,
        text: TextOptions,
        arrived: float,
        trace: GenerationTrace = NO_TRACE,
    ) -> None:
        """``arrived``: when the request arrived, in seconds on ``time.monotonic``."""
        self._model = model
        self._trace = trace
        self._arrived = arrived
        self._assembler = Assembler(text)
        self._last_token = arrived
        # Set if the deadline passed and the reply has what was generated so far.
        self.cut: DeadlineError | None = None
        self.spec = spec
        self.tokens = 0
        # Set with the last piece.
        self.finish: FinishReason | None = None

    @property
    def seed(self) -> int | None:
        """The seed that draws the same tokens again; None if greedy."""
        sampling = self.spec.sampling
        return None if sampling.greedy else sampling.seed

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text; "" if none did."""
        return self._assembler.stop

    @property
    def state(self) -> GenerationState:
        """The stage of the generation, such as queued or running."""
        return self._stream.state

    @property
    def times(self) -> StreamTimes:
        """The times at which it was submitted, started and had its first token."""
        return self._stream.times

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in the cache; known from the first pieces on."""
        return self._stream.cached_tokens

    @property
    def recomputed(self) -> Recomputed | None:
        """Why prompt tokens did not come from the cache; None until the generation has started."""
        return self._stream.recomputed

    @property
    def prompt_computed(self) -> int:
        """Prompt tokens that are computed so far, or were in the cache; 0 while the generation waits."""
        return self._stream.prompt_computed

    @property
    def prompt_logprobs(self) -> Sequence[PromptToken]:
        """One entry for each prompt token if the request asks for them; complete from the first pieces on."""
        return self._stream.prompt_logprobs

    @property
    def drafts(self) -> Sequence[DraftCount]:
        """The draft tokens so far, of each source that had any."""
        return self._stream.drafts

    def __enter__(self) -> Self:
        self._model.metrics.request_validated(len(self.spec.prompt), self.spec.stopping.max_new_tokens)
        self._stream = self._model.engine.submit(self.spec, self._trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finish is None:
            self._stream.close()
        if self.cut is not None:
            self._fail(Failure.DEADLINE)
        elif self.finish is not None:
            self._model.metrics.request_succeeded(self.timings(), self.tokens, self.finish)
            self._trace.finished(self.finish.value, self.tokens)
        elif isinstance(error, EngineError | AbortedError):
            self._fail(kind_of(error).failure or Failure.GENERATION)
        else:
            self._fail(Failure.DROPPED)

    def _fail(self, failure: Failure) -> None:
        self._model.metrics.request_failed(failure)
        self._trace.failed(failure.value, self.tokens)

    async def __aiter__(self) -> AsyncIterator[Iterator[list[Piece]]]:
        """Yield what is ready, then wait for more. Raises EngineError."""
        async for tokens in self._stream:
            yield self._assemble(tokens)
            if self.finish is not None:
                return
        raise IncompleteGenerationError("the stream ended without a finish reason")

    def _assemble(self, tokens: Sequence[GeneratedToken]) -> Iterator[list[Piece]]:
        """Yield the pieces that each token releases, never an empty list, until the run has ended.

        Raises ConstraintFailedError.
        """
        now = time.monotonic()
        # Tokens of one step come together. Each counts an equal part of the time, since gaps of zero would say nothing.
        gap = (now - self._last_token) / len(tokens) if self.tokens else 0.0
        for token in tokens:
            if token.finish is FinishReason.CONSTRAINT_FAILED:
                raise ConstraintFailedError("the output does not match its constraint and cannot go on")
            self._count_token(now, gap)
            pieces = self._assembler.push(token)
            if pieces:
                if pieces[-1].finish is not None:
                    self._end(pieces[-1].finish)
                yield pieces
            if self.finish is not None:
                return

    async def read(self, take: Callable[[Sequence[Piece]], None]) -> None:
        """Pass all pieces to ``take``, for a reply that is sent whole.

        A deadline ends the run with what was generated so far and FinishReason.LENGTH. Raises every other EngineError.
        """
        try:
            async for ready in self:
                for pieces in ready:
                    take(pieces)
        except DeadlineError as error:
            if held := self.cut_off(error):
                take(held)

    def cut_off(self, error: DeadlineError) -> list[Piece]:
        """End the run, whose deadline has passed, with FinishReason.LENGTH. Return the pieces that were held back."""
        self.cut = error
        self._end(FinishReason.LENGTH)
        return self._assembler.flush()

    def end_thought(self) -> bool:
        """End the thought now, if it has not ended. Return whether a thought of this generation can be ended."""
        thought = self.spec.thought
        if thought is None or not thought.ending or self.finish is not None:
            return False
        self._stream.end_thought()
        return True

    def call_tools(self) -> None:
        """Say that the answer calls tools, so that what it has in cells is kept for their results."""
        self._stream.call_tools()

    def end(self) -> None:
        """End the generation early, with the finish reason of a stop string."""
        if self.finish is None:
            self._end(FinishReason.STOP_SEQUENCE)

    def _end(self, finish: FinishReason) -> None:
        self.finish = finish
        self._stream.close()

    def _count_token(self, now: float, gap: float) -> None:
        if self.tokens and self.spec.beams is None:  # all tokens of a beam search come at once
            self._model.metrics.observe_inter_token(gap)
        elif not self.tokens:
            self._model.metrics.observe_first_token(now - self._arrived)
        self._last_token = now
        self.tokens += 1

    def timings(self) -> RequestTimings:
        """Return the duration of each stage up to the last token; 0 for a stage that was not reached."""
        times = self.times
        started = self._last_token if times.started is None else times.started
        first = self._last_token if times.first_token is None else times.first_token
        return RequestTimings(
            total_s=self._last_token - self._arrived,
            validation_s=times.submitted - self._arrived,
            queue_s=max(0.0, started - times.submitted),
            prefill_s=max(0.0, first - started),
            decode_s=max(0.0, self._last_token - first),
        )


class SavedRun(Run):
    """A run whose tokens are kept until they are taken, to be saved, and which may go on with saved ones."""

    __slots__ = ("_unsaved",)

    _unsaved: list[GeneratedToken]

    def __enter__(self) -> Self:
        self._unsaved = []
        return super().__enter__()

    def _assemble(self, tokens: Sequence[GeneratedToken]) -> Iterator[list[Piece]]:
        self._unsaved += tokens
        return super()._assemble(tokens)

    def take_unsaved(self) -> tuple[list[GeneratedToken], float | None]:
        """Return the tokens since the last call, and the feedback (`Continued`) that the last of them left.

        Both belong together until the next await.
        """
        taken, self._unsaved = self._unsaved, []
        return taken, self._stream.feedback

    def replay(self, tokens: Sequence[GeneratedToken]) -> Iterator[list[Piece]]:
        """Yield the pieces of tokens that were generated before the first one of this run: its spec's `Continued`."""
        for token in tokens:
            self.tokens += 1
            if pieces := self._assembler.push(token):
                yield pieces


@contextmanager
def started(
    model: ServedModel, requests: Sequence[ValidRequest], arrived: float, trace: RequestTrace
) -> Iterator[list[Run]]:
    """Submit the candidates of each prompt, prompt by prompt. All of them end with the block."""
    with ExitStack() as stack:
        # There is no await between submissions, so that generations of one prompt share its computation.
        yield [
            stack.enter_context(
                Run(model, spec, request.text, arrived, trace.generation(0 if index else len(spec.prompt)))
            )
            for request in requests
            for index, spec in enumerate(request.specs)
        ]


async def on_all(runs: Sequence[Run], work: Callable[[int, Run], Awaitable[None]]) -> None:
    """Do ``work`` on every run at the same time."""
    # A single run gets a task too: resuming a task goes through all of its nested coroutines, and the task that handles
    # the request is a dozen deep.
    await together([work(index, run) for index, run in enumerate(runs)])


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Await all at the same time. The first error cancels the others and is raised without an exception group."""

    async def one(awaitable: Awaitable[T]) -> T:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(awaitable)) for awaitable in work]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def read_all(runs: Sequence[Run], takers: Sequence[Callable[[Sequence[Piece]], None]]) -> None:
    """Read every run to its end and pass its pieces to the taker at the same index.

    Raises EngineError; DeadlineError only if no run generated a token in time, or prompt logprobs are missing.
    """

    async def read(index: int, run: Run) -> None:
        await run.read(takers[index])

    await on_all(runs, read)
    nothing = not any(run.tokens for run in runs)
    for run in runs:
        if run.cut is not None and not run.tokens and (nothing or run.spec.prompt_logprobs):
            raise run.cut


async def collect(runs: Sequence[Run]) -> list[list[Piece]]:
    """Return all pieces of each run; see `read_all`."""
    collected: list[list[Piece]] = [[] for _ in runs]
    await read_all(runs, [pieces.extend for pieces in collected])
    return collected


def best_first(candidates: Sequence[Sequence[Piece]]) -> list[int]:
    """Return the candidates' indices by descending mean logprob. Candidates of equal rank keep their order.

    TGI ranks by the mean too: a sum would prefer short candidates. A candidate without a token comes last.
    """
    means = [_mean_logprob(pieces) for pieces in candidates]
    return sorted(range(len(candidates)), key=lambda index: -means[index])


def _mean_logprob(pieces: Sequence[Piece]) -> float:
    if not pieces:
        return float("-inf")
    logprobs = [piece.token.logprob for piece in pieces if piece.token.logprob is not None]
    assert len(logprobs) == len(pieces), "ranking needs a logprob for each token"
    return sum(logprobs) / len(logprobs)
