"""The generating requests in progress: each is listed from its arrival to its last token, and can be aborted."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from caravan_dialects.api.errors import AbortedError
from caravan_dialects.api.generation.asked import Answer, R
from caravan_dialects.api.generation.context import ServedModel
from caravan_dialects.api.generation.run import Run, ValidRequest, started
from caravan_scheduler.core.trace import NO_TRACE, RequestTrace


@dataclass(slots=True, kw_only=True, eq=False)
class RequestInProgress:
    """One request. ``valid`` is empty, ``model`` is None and ``reply_id`` is "" until its body has been validated.

    ``runs`` is empty until it was submitted.

    ``owner``: name of its API key. ``arrived``: in seconds on ``time.monotonic``.
    """

    request_id: str
    owner: str
    route: str
    arrived: float
    trace: RequestTrace = NO_TRACE
    valid: Sequence[ValidRequest] = ()
    model: ServedModel | None = None
    runs: list[Run] = field(default_factory=list)
    reply_id: str = ""
    aborted: bool = False
    # The running block of `abortable`, which an abort interrupts.
    _scope: asyncio.Timeout | None = None

    def begin(self, model: ServedModel, reply: Answer) -> None:
        """Note what the request asks for, now that its body is valid, and let ``reply`` submit more."""
        self.model, self.valid, self.reply_id = model, reply.requests, reply.reply_id
        self.runs = []
        reply.submit = self.submitting

    def end_thoughts(self) -> bool:
        """End the thoughts of all generations now. Return whether any of them can be ended."""
        ended = [run.end_thought() for run in self.runs]
        return any(ended)

    def abort(self) -> None:
        """End the request. A block of `abortable` that runs, or the next one, raises AbortedError."""
        if not self.aborted:
            self.aborted = True
            if self._scope is not None:
                self._scope.reschedule(0.0)

    @asynccontextmanager
    async def abortable(self) -> AsyncIterator[None]:
        """Let an abort interrupt the block. Raises AbortedError, at the start if the abort came before the block."""
        if self.aborted:
            raise AbortedError
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                yield
        except TimeoutError:
            if scope.expired():
                raise AbortedError from None
            raise
        finally:
            self._scope = None

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[Sequence[Run]]:
        """Submit all generations and let an abort interrupt the block. All generations end with the block."""
        assert self.model is not None
        with started(self.model, self.valid, self.arrived, self.trace) as self.runs:
            async with self.abortable():
                yield self.runs

    @contextmanager
    def submitting(self, kind: type[R], request: ValidRequest) -> Iterator[R]:
        """Submit one more generation, which ends with the block."""
        assert self.model is not None
        [spec] = request.specs
        arrived = time.monotonic() if self.runs else self.arrived
        trace = self.trace.generation(len(spec.prompt))
        with kind(self.model, spec, request.text, arrived, trace) as run:
            self.runs.append(run)
            yield run


class RequestsInProgress:
    """The list of requests. The handler of a request adds it, and removes it when the handler ends."""

    def __init__(self) -> None:
        # A dict keeps the order of arrival. Clients choose the ids, so several requests may have the same.
        self._requests: dict[RequestInProgress, None] = {}

    @contextmanager
    def listing(self, entry: RequestInProgress) -> Iterator[None]:
        """List a request until the end of the block."""
        self._requests[entry] = None
        try:
            yield
        finally:
            del self._requests[entry]

    def of(self, owner: str) -> list[RequestInProgress]:
        """Return the requests of the API key of this name in the order of arrival, without aborted ones."""
        return [entry for entry in self._requests if entry.owner == owner and not entry.aborted]
