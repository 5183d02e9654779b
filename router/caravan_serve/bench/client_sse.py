"""Sends one request, times the bytes of its stream as they arrive, and keeps only the times."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import msgspec

from caravan_serve.bench.dialects import Dialect
from caravan_serve.bench.request import BenchRequest, ErrorKind, Failure, RequestResult, StreamRecord, TokenSource

_MESSAGE_CHARS = 300


class SseParser:
    """Parses server-sent events from bytes that may be split anywhere. Skips comments and all fields but ``data``."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that ``chunk`` completes, in order."""
        lines = (self._pending + chunk).split(b"\n")
        # The part after the last newline is an unfinished line, and often empty.
        self._pending = lines.pop()
        # Neither API spreads a JSON document over several data lines, so a line is an event.
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SseClient:
    """Sends requests to one server in one dialect."""

    session: aiohttp.ClientSession
    base_url: str
    dialect: Dialect
    timeout_s: float

    async def run(
        self, request: BenchRequest, *, scheduled: float | None = None, record: StreamRecord | None = None
    ) -> RequestResult:
        """Run one request to its end. A failure is part of the result, not an exception.

        Latencies count from ``scheduled``, by default now, so that a late client cannot flatter the server. The caller
        can pass a ``record`` to watch the stream while it runs.
        """
        start = time.perf_counter() if scheduled is None else scheduled
        record = StreamRecord() if record is None else record
        failure: Failure | None
        try:
            async with asyncio.timeout(self.timeout_s):
                failure = await self._stream(request, record)
        except TimeoutError:
            failure = Failure(ErrorKind.TIMEOUT, f"no end after {self.timeout_s:g} s")
        except aiohttp.ClientPayloadError as error:
            failure = Failure(ErrorKind.CUT, str(error)[:_MESSAGE_CHARS])
        except (aiohttp.ClientError, OSError) as error:
            failure = Failure(ErrorKind.CONNECTION, (str(error) or type(error).__name__)[:_MESSAGE_CHARS])
        return self._result(request, record, start, failure)

    async def _stream(self, request: BenchRequest, record: StreamRecord) -> Failure | None:
        body = self.dialect.body(request)
        url = self.base_url + self.dialect.path
        async with self.session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                return _refusal(response.status, await response.text(errors="replace"))
            async for when, data in self._events(response):
                try:
                    self.dialect.read(data, when, record)
                except msgspec.MsgspecError as error:
                    return Failure(ErrorKind.STREAM, f"unreadable event: {error}"[:_MESSAGE_CHARS])
                if record.error is not None:
                    return Failure(ErrorKind.STREAM, record.error[:_MESSAGE_CHARS])
        if not record.ended:
            return Failure(ErrorKind.CUT, "the stream ended without its last event")
        return None

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
        """Yield each event with the time of its arrival."""
        if not self.dialect.streams:
            whole = await response.read()
            yield time.perf_counter(), whole
            return
        parser = SseParser()
        async for chunk in response.content.iter_any():
            when = time.perf_counter()
            for data in parser.feed(chunk):
                yield when, data

    def _result(
        self, request: BenchRequest, record: StreamRecord, start: float, failure: Failure | None
    ) -> RequestResult:
        if record.usage_tokens is None:
            output_tokens, source = record.event_tokens, TokenSource.EVENTS
        else:
            output_tokens, source = record.usage_tokens, TokenSource.USAGE
            if record.event_tokens > output_tokens:
                output_tokens *= request.n  # llama-server counts the tokens of one choice; all have the same length
        asked = request.max_tokens * request.n if self.dialect.generates else 0
        ended_early = failure is None and output_tokens < asked
        if ended_early and self.dialect.fixes_length:
            failure = Failure(ErrorKind.SHORT, f"{output_tokens} of {asked} tokens")
        return RequestResult(
            scheduled=start,
            ended=time.perf_counter(),
            token_times=tuple(tuple(times) for _, times in sorted(record.token_times.items())),
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=output_tokens,
            token_source=source,
            ended_early=ended_early and failure is None,
            failure=failure,
        )


def _refusal(status: int, text: str) -> Failure:
    message = f"HTTP {status}: {text.strip()[:_MESSAGE_CHARS]}"
    if status == 429:
        return Failure(ErrorKind.OVERLOADED, message)
    return Failure(ErrorKind.REFUSED if status < 500 else ErrorKind.SERVER, message)
