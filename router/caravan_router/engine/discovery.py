"""Finds the addresses of shards: fixed ones, the IP addresses of a DNS name, the lines of a file, pods of a Service."""

import asyncio
import functools
import logging
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_log = logging.getLogger(__name__)

_HOST_AND_PORT = re.compile(r"[^\s,/]+:[0-9]{1,5}")
_SERVICE = re.compile(r"([a-z0-9-]+)/([a-z0-9-]+):([0-9]{1,5})")
_SOCKET = re.compile(r"unix(-abstract)?:\S+")

# What a lookup fails with when the name has no address, as that of a Service without pods.
_NO_ADDRESS = {socket.EAI_NONAME, socket.EAI_NODATA}
# A name has no address when so many lookups in a row say that: servers of names that have just started may say it too.
_SURE_LOOKUPS = 5
RESOLVER_FILE = Path("/etc/resolv.conf")


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
        try:
            return await self._resolve(self.host)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                raise
            # In a closed network, a cluster's servers know that their names have no address, and cannot ask others
            # about the name without a domain, which is tried last.
            domains = await asyncio.to_thread(_search_domains)
            if not domains or self.host.endswith("."):
                raise
            return await self._resolve_in(domains)

    async def _resolve_in(self, domains: list[str]) -> frozenset[str]:
        """Resolve the name in each of ``domains`` alone. Raises OSError: of no address only if all of them say so."""
        failures: list[socket.gaierror] = []
        for domain in domains:
            try:
                return await self._resolve(f"{self.host}.{domain}.")
            except socket.gaierror as error:
                failures.append(error)
        raise next((one for one in failures if one.errno not in _NO_ADDRESS), failures[0])

    async def _resolve(self, host: str) -> frozenset[str]:
        found = await asyncio.get_running_loop().getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
        return frozenset(
            f"[{endpoint[0]}]:{self.port}" if family == socket.AF_INET6 else f"{endpoint[0]}:{self.port}"
            for family, _, _, _, endpoint in found
        )

    def __str__(self) -> str:
        return f"dns:{self.host}:{self.port}"


def _search_domains() -> list[str]:
    """Return the domains in which the system looks for names that are not whole."""
    try:
        lines = RESOLVER_FILE.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    # The last line counts.
    found = next((one[1:] for one in reversed(words) if one and one[0] in {"search", "domain"}), [])
    return [domain for one in found if (domain := one.strip("."))]


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


@dataclass(frozen=True, slots=True)
class KubernetesService:
    """The shards behind a Service, which the API server is asked for: see `caravan_router.kubernetes`."""

    namespace: str
    name: str
    port: int

    def __str__(self) -> str:
        return f"k8s:{self.namespace}/{self.name}:{self.port}"


class WatchedSource(Protocol):
    """A source that tells by itself when its addresses change."""

    async def watch(self, note: Callable[[frozenset[str]], None]) -> None:
        """Call ``note`` with every new set of addresses, until cancelled."""
        ...


class AddressBook:
    """A source of shards that this program itself starts and ends."""

    def __init__(self) -> None:
        self._addresses: frozenset[str] = frozenset()
        self._note: Callable[[frozenset[str]], None] = lambda _addresses: None

    async def watch(self, note: Callable[[frozenset[str]], None]) -> None:
        """See `WatchedSource`."""
        self._note = note
        note(self._addresses)
        await asyncio.get_running_loop().create_future()

    def add(self, address: str) -> None:
        """Add the address of a shard that listens."""
        self._addresses |= {address}
        self._note(self._addresses)

    def remove(self, address: str) -> None:
        """Remove the address of a shard that has ended."""
        self._addresses -= {address}
        self._note(self._addresses)


# What a flag can name, and where addresses are found.
NamedSource = Address | DnsName | AddressFile | KubernetesService
ShardSource = Address | DnsName | AddressFile | WatchedSource


def parse_source(text: str) -> NamedSource:
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
    if kind == "k8s":
        if not (found := _SERVICE.fullmatch(rest)):
            raise ValueError(f"must be k8s:namespace/service:port. Given: {text!r}")
        return KubernetesService(found[1], found[2], int(found[3]))
    return Address(text)


class Discovery:
    """Keeps the set of addresses of all ``sources`` current, and calls ``on_change`` with every new set.

    Names and files are looked up every ``refresh_s`` seconds. A new address counts at once. An address counts as gone
    when two lookups in a row lack it, so that a file that is being written and an incomplete DNS answer do no harm, and
    when five in a row say that the name has no address. Any other lookup that fails changes nothing. A source that is
    watched says itself what counts.
    """

    def __init__(
        self, sources: Iterable[ShardSource], refresh_s: float, on_change: Callable[[frozenset[str]], None]
    ) -> None:
        self._refresh_s = refresh_s
        self._on_change = on_change
        # The addresses of each source. A source with fixed ones is never looked up.
        self._found: dict[ShardSource, frozenset[str]] = {}
        self._looked_up: list[DnsName | AddressFile] = []
        self._watched: list[WatchedSource] = []
        for source in dict.fromkeys(sources):
            match source:
                case Address():
                    self._found[source] = frozenset((source.address,))
                case DnsName() | AddressFile():
                    self._looked_up.append(source)
                case _:
                    self._watched.append(source)

    async def run(self) -> None:
        """Follow all sources until cancelled; return at once if all addresses are fixed."""
        self._on_change(self._addresses)
        async with asyncio.TaskGroup() as tasks:
            for source in self._looked_up:
                tasks.create_task(self._look_up(source))
            for watched in self._watched:
                tasks.create_task(watched.watch(functools.partial(self._note, watched)))

    @property
    def _addresses(self) -> frozenset[str]:
        return frozenset[str]().union(*self._found.values())

    async def _look_up(self, source: DnsName | AddressFile) -> None:
        last: frozenset[str] = frozenset()
        failed = False
        empty = 0
        while True:
            try:
                listed = await source.look_up()
            except (OSError, ValueError) as error:
                if not failed:
                    extra = {"source": str(source), "reason": str(error), "shards": len(last)}
                    _log.warning("the addresses of shards cannot be looked up; keeping the last ones", extra=extra)
                failed = True
                is_empty = isinstance(error, socket.gaierror) and error.errno in _NO_ADDRESS
                empty = empty + 1 if is_empty else 0
                if empty == _SURE_LOOKUPS:
                    last = frozenset()
                    self._note(source, last)
            else:
                failed, empty = False, 0
                self._note(source, listed | last)
                last = listed
            await asyncio.sleep(self._refresh_s)

    def _note(self, source: ShardSource, addresses: frozenset[str]) -> None:
        known, self._found[source] = self._found.get(source, frozenset()), addresses
        if addresses != known:
            self._on_change(self._addresses)
