"""What a generating request asks for, in its dialect, before its model is known; and what the dialect answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol, TypeVar

from caravan_dialects.api.error_table import Dialect
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import Run, ValidRequest, on_all
from caravan_dialects.api.stream import SERVER_SENT, Events, Framing
from caravan_scheduler.core.engine import Fleet

R = TypeVar("R", bound=Run)


class Submit(Protocol):
    """Submits one more generation of a request that is being answered. It ends with the block."""

    def __call__(self, kind: type[R], request: ValidRequest, /) -> AbstractContextManager[R]: ...


class Answer(ABC):
    """The answer to one request: either `whole`, or `stream` and then `last_event`.

    ``requests``: what is generated. The runs of each come in this order. ``reply_id``: names the reply for other
    requests while it is written; "" if none can name it. ``submit``: for what is generated later; set once the request
    is in progress.
    """

    reply_id: str = ""
    submit: Submit

    def __init__(self, requests: Sequence[ValidRequest]) -> None:
        self.requests = requests

    @abstractmethod
    async def whole(self, runs: Sequence[Run]) -> bytes:
        """Read all runs and return the JSON body. Raises EngineError."""

    async def stream(self, events: Events, runs: Sequence[Run]) -> None:
        """Stream all runs. Raises EngineError, RequestError."""

        async def send(index: int, run: Run) -> None:
            await self.send(events, index, run)

        await on_all(runs, send)

    async def send(self, events: Events, index: int, run: Run) -> None:
        """Stream one run. Raises EngineError. Answers that are never streamed do not implement it."""
        raise NotImplementedError

    def last_event(self, runs: Sequence[Run]) -> bytes | None:
        """Return the JSON of the event after all runs have ended well; None if there is none."""
        return None


class Asked(ABC):
    """One request of one dialect. It is made from the body; then `validate` returns the `Answer`."""

    dialect: ClassVar[Dialect]
    framing: ClassVar[Framing] = SERVER_SENT
    # Validation errors of these types become an event after status 200 when the reply is streamed.
    errors_as_events: ClassVar[tuple[type[Exception], ...]] = ()

    # What is generated, in the terms of OpenTelemetry (`ServedRequest`).
    operation: str = "text_completion"
    # The field of the body that names a model or an adapter.
    model: str | None = None
    # One for each candidate of each prompt.
    generations: int = 1
    # Permits to hold; None for one for each generation.
    permits: int | None = None
    streamed: bool = False
    # Length of the prompt as written, for the headers of an error that is sent as an event.
    characters: int = 0

    def asks_for(self, header: str, fleet: Fleet) -> str:
        """Return the name of the model or adapter that the request asks for; "" for the default.

        ``header``: the name in its header, which counts if the body names none.
        """
        return self.model or header

    @abstractmethod
    async def validate(self, context: Context) -> Answer:
        """Check the body. Raises RequestError, EngineError."""

    def error_messages(self, error: Exception) -> Sequence[bytes]:
        """Return the messages that end a stream with ``error``."""
        return (self.dialect.body(error, ""),)
