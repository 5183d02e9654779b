"""One generation as text: the token stream and what is made of it, closed together."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from caravan_router.core.engine import StreamTimes, TokenStream
from caravan_router.core.errors import GenerationError
from caravan_router.core.sampling import FinishReason
from caravan_router.core.tokens import PromptToken
from caravan_router.text.assembler import Assembler, Piece


class IncompleteGenerationError(GenerationError):
    """The stream ended without saying why."""


class Generation:
    """Iterates over lists of pieces that may leave together; use as a context manager, which closes the stream.

    The stream is closed as soon as a stop string matched: its sequence gets no further step. ``on_token`` is called
    as each token arrives, before it may be held back.
    """

    __slots__ = ("_assembler", "_closed", "_on_token", "_stream", "_tokens", "finish")

    def __init__(self, stream: TokenStream, stops: Sequence[str], on_token: Callable[[], None]) -> None:
        self._stream = stream
        self._tokens = aiter(stream)
        self._assembler = Assembler(stops)
        self._on_token = on_token
        self._closed = False
        self.finish: FinishReason | None = None

    @property
    def times(self) -> StreamTimes:
        return self._stream.times

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that had been computed before; known from the first pieces on."""
        return self._stream.cached_tokens

    @property
    def prompt_logprobs(self) -> Sequence[PromptToken]:
        """One entry for each token of the prompt if they were asked for, else empty. Complete at the first pieces."""
        return self._stream.prompt_logprobs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def end(self) -> None:
        """Its reader needs no more: it counts as ended by a stop string, which a reader finds likewise."""
        if self.finish is None:
            self.finish = FinishReason.STOP_SEQUENCE
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._stream.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Piece]:
        """The next pieces, never an empty list. Raises GenerationError, NoShardError."""
        if self.finish is not None:
            raise StopAsyncIteration
        while True:
            try:
                token = await anext(self._tokens)
            except StopAsyncIteration:
                raise IncompleteGenerationError("the stream ended without a finish reason") from None
            self._on_token()
            pieces = self._assembler.push(token)
            if pieces:
                self.finish = pieces[-1].finish
                if self.finish is not None:
                    self._close()
                return pieces
