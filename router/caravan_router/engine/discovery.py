"""Finds the addresses of shards: fixed ones, the IP addresses of a DNS name, the lines of a file."""

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

_log = logging.getLogger(__name__)

_HOST_AND_PORT = re.compile(r"[^\s,]+:[0-9]{1,5}")
_SOCKET = re.compile(r"unix(-abstract)?:\S+")


@dataclass(frozen=True, slots=True)
class Address:
    """One shard at a fixed address: ``unix:/path`` or ``host:port``. Raises ValueError if it is neither."""

    address: str

    def __post_init__(self) -> None:
        if not (_SOCKET.fullmatch(self.address) or _HOST_AND_PORT.fullmatch(self.address)):
            raise ValueError(f"must be unix:/path or host:port. Given: {self.address!r}")


@dataclass(frozen=True, slots=True)
class DnsName:
    """A shard at every IP address of a name, such as that of a headless Service."""

    host: str
    port: int

    async def look_up(self) -> frozenset[str]:
        """Return an address for each IP address. Raises OSError or ValueError if the name cannot be resolved."""
        found = await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return frozenset(
            f"[{endpoint[0]}]:{self.port}" if family == socket.AF_INET6 else f"{endpoint[0]}:{self.port}"
            for family, _, _, _, endpoint in found
        )

    def __str__(self) -> str:
        return f"dns:{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class AddressFile:
    """The shards that a file lists: one address per line; ``#`` starts a comment."""

    path: str

    async def look_up(self) -> frozenset[str]:
        """Read the file. Raises OSError or ValueError if it cannot be read or has a line that is no address."""
        lines = (await asyncio.to_thread(Path(self.path).read_text, "utf-8")).splitlines()
        texts = (line.partition("#")[0].strip() for line in lines)
        return frozenset(Address(text).address for text in texts if text)

    def __str__(self) -> str:
        return f"file:{self.path}"


ShardSource = Address | DnsName | AddressFile


def parse_source(text: str) -> ShardSource:
    """Read a value of ``--shard``. Raises ValueError."""
    kind, _, rest = text.partition(":")
    if kind == "file":
        if not rest:
            raise ValueError(f"must be file:path. Given: {text!r}")
        return AddressFile(rest)
    if kind == "dns":
        if not _HOST_AND_PORT.fullmatch(rest):
            raise ValueError(f"must be dns:name:port. Given: {text!r}")
        host, _, port = rest.rpartition(":")
        return DnsName(host, int(port))
    return Address(text)


class Discovery:
    """Keeps the set of addresses of all ``sources`` current, and calls ``on_change`` with every new set.

    Names and files are looked up every ``refresh_s`` seconds. A new address counts at once. An address counts as gone
    when two lookups in a row lack it, so that a file that is being written and an incomplete DNS answer do no harm. A
    lookup that fails changes nothing.
    """

    def __init__(
        self, sources: Iterable[ShardSource], refresh_s: float, on_change: Callable[[frozenset[str]], None]
    ) -> None:
        self._refresh_s = refresh_s
        self._on_change = on_change
        # The addresses of each source. A source with fixed ones is never looked up.
        self._found: dict[ShardSource, frozenset[str]] = {}
        self._watched: list[DnsName | AddressFile] = []
        for source in dict.fromkeys(sources):
            match source:
                case Address():
                    self._found[source] = frozenset((source.address,))
                case DnsName() | AddressFile():
                    self._watched.append(source)
                case _:
                    assert_never(source)

    async def run(self) -> None:
        """Watch the names and files until cancelled; return at once if there are none."""
        self._on_change(self._addresses)
        async with asyncio.TaskGroup() as tasks:
            for source in self._watched:
                tasks.create_task(self._watch(source))

    @property
    def _addresses(self) -> frozenset[str]:
        return frozenset[str]().union(*self._found.values())

    async def _watch(self, source: DnsName | AddressFile) -> None:
        last: frozenset[str] = frozenset()
        failed = False
        while True:
            try:
                listed = await source.look_up()
            except (OSError, ValueError) as error:
                if not failed:
                    extra = {"source": str(source), "reason": str(error), "shards": len(last)}
                    _log.warning("the addresses of shards cannot be looked up, the last ones stay", extra=extra)
                failed = True
            else:
                failed = False
                self._note(source, listed | last)
                last = listed
            await asyncio.sleep(self._refresh_s)

    def _note(self, source: DnsName | AddressFile, addresses: frozenset[str]) -> None:
        known, self._found[source] = self._found.get(source, frozenset()), addresses
        if addresses != known:
            self._on_change(self._addresses)
