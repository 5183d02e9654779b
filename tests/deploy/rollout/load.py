"""Clients that ask for streamed replies, one after another, and note what goes wrong."""

import contextlib
import http.client
import json
import threading
import time
from typing import Protocol

from caravan_testing.waiting import wait_until

CLIENTS = 6
PROMPT = "Once upon a time"
NEW_TOKENS = 120


class Routers(Protocol):
    """The routers of a Service."""

    def known(self) -> tuple[str, ...]:
        """Return the addresses that a client knows now."""
        ...


class Load:
    """Clients that ask one after another, each on a new connection to a router that its Service names."""

    def __init__(self, routers: Routers, port: int = 3000) -> None:
        self._routers = routers
        self._port = port
        self._stop = threading.Event()
        # The text of each reply, with the router that gave it, and how long it took, in seconds.
        self.replies: list[tuple[str, str]] = []
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask_on, args=(number,)) for number in range(CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def until_each_is_answered(self) -> None:
        """Wait until every client has got a reply to a request that it sends from now on."""
        wanted = len(self.replies) + 2 * CLIENTS
        wait_until(lambda: len(self.replies), f"{wanted} replies", lambda found: found >= wanted)

    def _ask_on(self, number: int) -> None:
        turn = number
        while not self._routers.known():
            time.sleep(0.1)
        while not self._stop.is_set():
            addresses = self._routers.known()
            turn += 1
            try:
                address = addresses[turn % len(addresses)]
                began = time.monotonic()
                self.replies.append((address, ask(address, self._port)))
                self.seconds.append(time.monotonic() - began)
            except (OSError, http.client.HTTPException, AssertionError, ValueError, ZeroDivisionError) as error:
                self.failures.append(f"{time.monotonic():.1f} {addresses}: {error!r}")
                time.sleep(0.2)


def ask(address: str, port: int) -> str:
    """Return the text of one streamed reply. Raises AssertionError if it is an error or not whole."""
    body = {"prompt": PROMPT, "max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    with contextlib.closing(http.client.HTTPConnection(address, port, timeout=180)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        lines = reply.read().decode().splitlines()
    assert reply.status == 200, lines
    *events, done = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
    assert done == "[DONE]", lines
    choices = [json.loads(event)["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "length", choices
    return "".join(choice["text"] for choice in choices)
