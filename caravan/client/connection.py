"""Sends calls to a server over HTTP and reads what comes back."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import httpx2
import msgspec

from caravan.client.errors import BadReplyError, ConnectionLostError, UnreachableError, read_failure
from caravan.errors import ClosedError

T = TypeVar("T")
_Part_co = TypeVar("_Part_co", covariant=True)

_CONNECT_TIMEOUT_S = 10.0
# With these and Retry-After, the server has refused a call and computed nothing.
_REFUSED = frozenset({409, 429, 503})
# A server on this host is reached through no proxy, whatever the environment names.
DIRECT: Mapping[str, None] = {"all://localhost": None, "all://127.0.0.1": None, "all://[::1]": None}
# The last event of a response repeats all of it.
_MAX_EVENT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request. ``path`` begins with a slash. ``if_match``: head of a conversation, without which nothing changes."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    if_match: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply, and its X-Request-Id."""

    body: bytes
    request_id: str

    def read(self, kind: type[T]) -> T:
        """Return the reply. Raises BadReplyError if it is not a ``kind``."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.MsgspecError as error:
            raise BadReplyError(f"the reply is none of Caravan's: {error}") from None


class EventReader(Protocol[_Part_co]):
    """Turns the events of one stream into parts. ``ended`` is true after the last event that the stream must have."""

    @property
    def ended(self) -> bool: ...

    def read(self, event: str) -> Iterable[_Part_co]:
        """Return the parts that an event completes. Raises ApiError, and MsgspecError for an event of another form."""
        ...


class Connection:
    """Calls to one server. The code that makes it closes it.

    ``retries``: how often a call is sent again after the server refused it with ``Retry-After``.
    """

    def __init__(self, url: str, headers: Mapping[str, str], retries: int, http: httpx2.AsyncClient | None) -> None:
        """``http`` is closed with the connection. Raises ValueError if ``url`` is not that of a server."""
        self._url = _base_url(url)
        self._headers = headers
        self._retries = retries
        self._http = http or httpx2.AsyncClient(
            mounts=DIRECT,
            # The server keeps the timeout of a request. Until its reply ends, the connection may be silent.
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None),
        )
        self._closed = False

    async def close(self) -> None:
        """Close all connections. Closing it again does nothing."""
        self._closed = True
        await self._http.aclose()

    async def ask(self, call: Call) -> Answer:
        """Return the whole reply. Raises ApiError, ServerConnectionError, ClosedError."""
        with self._named_errors():
            async with self._answered(call) as response:
                return Answer(await response.aread(), _request_id(response))

    async def stream(self, call: Call, reader_of: Callable[[str], EventReader[T]]) -> AsyncGenerator[T, None]:
        """Yield the parts of a streamed reply. ``reader_of`` makes the reader of a reply with this X-Request-Id.

        Closing the generator closes the connection, which ends the generation on the server. Raises what `ask` raises,
        and BadReplyError.
        """
        with self._named_errors():
            async with self._answered(call) as response:
                reader = reader_of(_request_id(response))
                async for event in httpx2.EventSource(response, max_event_size=_MAX_EVENT_BYTES):
                    for part in reader.read(event.data):
                        yield part
        if not reader.ended:
            raise ConnectionLostError(f"{self._url}: the stream ended before its last event")

    @asynccontextmanager
    async def _answered(self, call: Call) -> AsyncIterator[httpx2.Response]:
        """Yield the response, which is no error and whose body is not read yet; close it at the end of the block."""
        retries = self._retries
        while True:
            async with self._sent(call) as response:
                if response.is_success:
                    yield response
                    return
                failure = read_failure(response.status_code, response.headers, await response.aread())
            wait_s = failure.details.retry_after_s
            if retries == 0 or wait_s is None or failure.details.status not in _REFUSED:
                raise failure
            retries -= 1
            await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def _sent(self, call: Call) -> AsyncIterator[httpx2.Response]:
        if self._closed:
            raise ClosedError("the client is closed")
        matching = {} if call.if_match is None else {"If-Match": f'"{call.if_match}"'}
        async with self._http.stream(
            call.method,
            self._url + call.path,
            json=call.body,
            params=call.query,
            headers={**self._headers, **matching},
        ) as response:
            yield response

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn the errors of libraries into those of this package."""
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
            raise UnreachableError(f"{self._url} cannot be reached: {_reason(error)}") from None
        except (msgspec.MsgspecError, httpx2.SSEError, httpx2.DecodingError) as error:
            raise BadReplyError(f"the reply of {self._url} is none of Caravan's: {_reason(error)}") from None
        except httpx2.TransportError as error:
            raise ConnectionLostError(f"the connection to {self._url} broke: {_reason(error)}") from None


def _base_url(url: str) -> str:
    """Return the URL without a slash at its end, and without "/v1", which OpenAI's client needs there."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(
            f"the URL of a server is needed, such as http://127.0.0.1:3000. Given: {url!r}: {error}"
        ) from None
    if parsed.scheme not in {"http", "https"} or not parsed.host or parsed.query or parsed.fragment:
        raise ValueError(f"the URL of a server is needed, such as http://127.0.0.1:3000. Given: {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def _request_id(response: httpx2.Response) -> str:
    return response.headers.get("x-request-id", "")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
