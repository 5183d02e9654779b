"""Every hostile request gets its status, and does not change the streams that run meanwhile."""

import asyncio
import re
import socket
from collections.abc import Iterator

import pytest
from e2e.hostile_requests import GOOD, TABLE, Hostile

from caravan_testing.http_server import undisturbed
from caravan_testing.raw_http import HOST, exchange, port_of, post, replies_in
from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import DEADLINE_S, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.model]

AT_ONCE = 8
# Descriptors of what the first conversations and constraints start and what stays: template processes, threads.
MOST_KEPT_OPEN = 24


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server with short timeouts, so that slow clients are quick to test, yet long enough for a busy machine."""
    flags = ("--header-timeout-s", "5", "--body-timeout-s", "3", "--slow-client-timeout-s", "3")
    with serve("-np", "16", "-c", "8192", "-t", "1", *flags) as running:
        yield running


async def _send(url: str, hostile: Hostile, wrong: list[str]) -> None:
    try:
        received = await exchange(url, [hostile.raw])
    except AssertionError:
        wrong.append(f"{hostile.name}: the server does not hang up")
        return
    if hostile.status is None:
        if received:
            wrong.append(f"{hostile.name}: {received[:300]!r}")
        return
    (status,) = re.findall(rb"\AHTTP/\d\.\d (\d+) ", received) or [b"0"]
    error = ""
    if int(status) >= 400:
        (reply,) = replies_in(received)
        answer = reply.json().get("error")
        error = str(answer.get("message") if isinstance(answer, dict) else answer)
    if int(status) not in (hostile.status, hostile.or_status) or hostile.says not in error or len(error) > 500:
        wrong.append(f"{hostile.name}: expected {hostile.status} {hostile.says!r}, not {received[:500]!r}")


def _tracebacks(log: list[str]) -> str:
    """Return each traceback of the server with the lines around it."""
    lines = list(log)
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    return "\n".join("".join(lines[max(0, start - 2) : start + 40]) for start in starts)


async def test_hostile_requests_get_their_status_and_disturb_no_stream(served: Served) -> None:
    assert len(TABLE) > 160
    wrong: list[str] = []
    before = served.descriptors()
    gate = asyncio.Semaphore(AT_ONCE)

    async def send(hostile: Hostile) -> None:
        async with gate:
            await _send(served.url, hostile, wrong)

    async with undisturbed(served.url):
        await asyncio.gather(*(send(hostile) for hostile in TABLE))
    assert not wrong, "\n".join(wrong)
    assert served.healthy()
    assert not _tracebacks(served.log)
    most = before + MOST_KEPT_OPEN
    await eventually(served.descriptors, f"at most {most} descriptors are open", lambda found: found <= most)


async def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    """Bytes after a body are the next request, and never part of this one."""
    first = post("/generate", GOOD)
    smuggled = post("/generate", b"{")
    last = b"GET /nope HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    replies = replies_in(await exchange(served.url, [first + smuggled + last]))
    assert [reply.status for reply in replies] == [200, 400, 404]


@pytest.mark.slow
async def test_a_client_that_stops_sending_counts_as_gone(served: Served) -> None:
    """A connection that is closed in one direction ends its generation; others continue."""
    async with undisturbed(served.url):
        for body in (b'{"inputs":"Once","parameters":{"max_new_tokens":2000}}', b'{"inputs":'):
            with socket.create_connection((HOST, port_of(served.url)), timeout=DEADLINE_S) as connection:
                connection.sendall(post("/generate", body) if body.endswith(b"}") else post("/generate", body)[:-5])
                connection.shutdown(socket.SHUT_WR)
                assert await asyncio.to_thread(connection.recv, 100) == b""


@pytest.mark.slow
async def test_many_slow_connections_do_not_disturb_others(served: Served) -> None:
    """200 clients send their headers slowly and never end."""

    def trickle() -> Iterator[bytes]:
        yield b"POST /generate HTTP/1.1\r\n"
        while True:
            yield b"X-A: b\r\n"

    async with undisturbed(served.url):
        slow = [exchange(served.url, trickle(), pause_s=0.1) for _ in range(200)]
        assert set(await asyncio.gather(*slow)) == {b""}
