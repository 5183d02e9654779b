"""One generation as text: the token stream and the assembler that reads it, closed together."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from caravan_router.core.engine import StreamTimes, TokenStream
from caravan_router.core.errors import GenerationError
from caravan_router.core.sampling import FinishReason
from caravan_router.core.tokens import PromptToken
from caravan_router.text.assembler import Assembler, Piece, TextOptions


class IncompleteGenerationError(GenerationError):
    """The stream ended without a finish reason."""


class Generation:
    """Iterates over lists of pieces that can be sent together. A context manager that closes the stream.

    A matched stop string closes the stream at once, so that its sequence gets no further step. ``on_token`` is called
    when a token arrives, before the assembler may hold it back.
    """

    __slots__ = ("_assembler", "_closed", "_on_token", "_stream", "_tokens", "finish")

    def __init__(self, stream: TokenStream, stops: Sequence[str], on_token: Callable[[], None]) -> None:
        self._stream = stream
        self._tokens = aiter(stream)
        self._assembler = Assembler(TextOptions(stops=tuple(stops)))
        self._on_token = on_token
        self._closed = False
        self.finish: FinishReason | None = None

    @property
    def times(self) -> StreamTimes:
        return self._stream.times

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens whose KV cells were reused; known once pieces have arrived."""
        return self._stream.cached_tokens

    @property
    def prompt_logprobs(self) -> Sequence[PromptToken]:
        """One entry per prompt token if the spec asks for them, else empty. Complete once pieces have arrived."""
        return self._stream.prompt_logprobs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def end(self) -> None:
        """End the generation because its reader needs no more text. It counts as ended by a stop string."""
        if self.finish is None:
            self.finish = FinishReason.STOP_SEQUENCE
            self._close()

    def cut(self) -> list[Piece]:
        """End the generation before its last token, as a deadline does. Return the pieces that were held back.

        ``finish`` is then FinishReason.LENGTH, also on the last returned piece, if there is one.
        """
        self.finish = FinishReason.LENGTH
        self._close()
        return self._assembler.flush()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._stream.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Piece]:
        """Return the next pieces, at least one. Raises GenerationError, NoShardError."""
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
