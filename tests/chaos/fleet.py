"""A router and four shards as processes: on Unix sockets, behind a proxy, and in a network namespace of its own."""

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import trustme
from aiohttp import ClientError, ClientSession, ClientTimeout

from caravan_testing.certificates import write_certificate
from caravan_testing.programs import Program, kept_ports, program, url_of
from caravan_testing.serve_process import MODEL

_CHUNK = 16_384


class LinkProxy:
    """Forwards connections from `address` to ``target`` (host:port). Use it as a context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._delay_s = 0.0
        self._bytes_per_s = math.inf
        self._cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._busy: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> "LinkProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._end_connections()

    def slow(self, delay_s: float, bytes_per_s: float) -> None:
        """Delay every chunk of bytes by ``delay_s`` and by its size over ``bytes_per_s``."""
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

    def stall(self) -> None:
        """Let no byte through. Connections stay open, and new ones are accepted."""
        self._flowing.clear()

    async def cut(self) -> None:
        """Reset all connections, and each new one."""
        self._cut = True
        await self._end_connections()

    def mend(self) -> None:
        """Forward bytes as they come again."""
        self.slow(0.0, math.inf)
        self._cut = False
        self._flowing.set()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self._cut:
                return
            up_reader, up_writer = await asyncio.open_connection(*self._target)
            writers.append(up_writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(up_reader, writer))
                tasks.create_task(self._copy(reader, up_writer))
        except* OSError:
            pass
        finally:
            for one in writers:
                one.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            await self._flowing.wait()
            if self._delay_s:
                await asyncio.sleep(self._delay_s + len(data) / self._bytes_per_s)
            sink.write(data)
            await sink.drain()
        # One side has ended, and so does the other.
        raise ConnectionResetError

    async def _end_connections(self) -> None:
        for task in list(self._busy):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._busy, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Namespace:
    """The namespace ``name``. Programs in it have the address ``host``, and reach this side through ``link``."""

    name: str
    link: str
    host: str

    @property
    def command(self) -> tuple[str, ...]:
        """Return what to put before a command that is to run there. The process keeps its id."""
        return ("ip", "netns", "exec", self.name)

    async def set_link(self, state: str) -> None:
        """Take the link ``down`` or ``up``. While it is down, packets vanish."""
        await asyncio.to_thread(_ip, "-n", self.name, "link", "set", self.link, state)


@contextlib.asynccontextmanager
async def namespace() -> AsyncIterator[Namespace | str]:
    """Make a namespace and remove it at the end; yield why not where this process cannot."""
    # RFC 2544 sets these addresses apart for tests.
    number = os.getpid()
    made = Namespace(f"chaos-{number}", f"cb{number}", f"198.18.{number % 256}.2")
    near_end, near = f"ca{number}", f"198.18.{number % 256}.1"
    if shutil.which("ip") is None:
        yield "there is no program `ip` here"
        return
    try:
        await asyncio.to_thread(_ip, "netns", "add", made.name)
    except subprocess.CalledProcessError as error:
        yield f"no network namespace can be made here: {error.stderr.strip()}"
        return
    try:
        for command in (
            ("link", "add", near_end, "type", "veth", "peer", "name", made.link, "netns", made.name),
            ("addr", "add", f"{near}/30", "dev", near_end),
            ("link", "set", near_end, "up"),
            ("-n", made.name, "addr", "add", f"{made.host}/30", "dev", made.link),
            ("-n", made.name, "link", "set", made.link, "up"),
            ("-n", made.name, "link", "set", "lo", "up"),
        ):
            try:
                await asyncio.to_thread(_ip, *command)
            except subprocess.CalledProcessError as error:
                yield f"no link to a network namespace can be made here: {error.stderr.strip()}"
                return
        yield made
    finally:
        # The link goes with it.
        await asyncio.to_thread(_ip, "netns", "del", made.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


_SHARD_FLAGS = ("-m", str(MODEL), "-c", "1024", "-np", "4", "-t", "1", "--cache-ram", "64")
# A shard gives its sequences 30 s to end.
_DRAIN_S = 300.0
_LOST = re.compile(r"^(\S+ \S+) WARNING .*: shard is not available shard=(\S+) ")


@dataclass(slots=True, eq=False)
class Spot:
    """A place where a shard runs, is killed and is started again. ``address``: where the router looks for it."""

    name: str
    address: str
    flags: tuple[str, ...]
    proxy: LinkProxy | None = None
    network: Namespace | None = None
    running: Program | None = None
    _ending: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def start(self) -> None:
        """Start the shard; it loads its model meanwhile."""
        before = () if self.network is None else self.network.command
        arguments = (*_SHARD_FLAGS, *self.flags, "--shard-id", self.name)
        self.running = await self._ending.enter_async_context(program("caravan_shard", *arguments, before=before))

    async def kill(self) -> None:
        """Kill the shard, if it runs."""
        await self._ending.aclose()

    async def drain(self) -> None:
        """End the shard with SIGTERM, which lets it give its work to others."""
        self.send(signal.SIGTERM)
        assert self.running is not None
        async with asyncio.timeout(_DRAIN_S):
            assert await self.running.process.wait() == 0, self.running.text
        await self._ending.aclose()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the shard."""
        assert self.running is not None
        self.running.process.send_signal(number)


@dataclass(slots=True)
class Fleet:
    """``without``: reasons why some faults cannot be tried here. ``routers``: all so far, the current one last.

    ``recordings``: what each of them has recorded, which is complete when it has ended.
    """

    spots: list[Spot]
    without: list[str]
    _folder: Path
    _router_flags: list[str]
    _ending: contextlib.AsyncExitStack
    routers: list[Program] = field(default_factory=list)
    recordings: list[Path] = field(default_factory=list)
    url: str = ""

    async def start_router(self) -> None:
        """Start a router, which takes the port over from the one that runs."""
        self.recordings.append(self._folder / f"recording-{len(self.routers)}")
        record = ("--record", str(self.recordings[-1]))
        started = program("caravan_serve", "router", "--port", "0", *self._router_flags, *record)
        self.routers.append(await self._ending.enter_async_context(started))
        url = await url_of(self.routers[-1])
        assert self.url in ("", url), self.routers[-1].text
        self.url = url

    async def standings(self) -> dict[str, str]:
        """Return the state of each shard as the router shows it."""
        async with ClientSession(timeout=ClientTimeout(total=5)) as session:
            try:
                async with session.get(f"{self.url}/admin/shards") as response:
                    shards: list[dict[str, Any]] = json.loads(await response.text())["shards"]
            except (ClientError, TimeoutError):
                return {}
        return {shard["address"]: shard["state"] for shard in shards}

    async def metrics(self) -> str:
        """Return the text of /metrics."""
        async with ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            return await response.text()

    async def wait_until_all_serve(self, within_s: float = 300.0) -> bool:
        """Return whether all shards serve within this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    states = await self.standings()
                    if [states.get(spot.address) for spot in self.spots] == ["serving"] * len(self.spots):
                        return True
                    await asyncio.sleep(0.1)
        return False

    def shards_that_died(self) -> list[str]:
        """Return the shards that do not run now."""
        return [spot.name for spot in self.spots if spot.running is None or spot.running.process.returncode is not None]

    def losses(self) -> list[tuple[float, str]]:
        """Return when the router has given up which address, in seconds of ``time.time``."""
        found = [_LOST.match(line) for router in self.routers for line in router.log]
        return [(_seconds(one[1]), one[2]) for one in found if one is not None]


def _seconds(logged: str) -> float:
    return datetime.strptime(logged, "%Y-%m-%d %H:%M:%S,%f").timestamp()  # noqa: DTZ007 - the log has local time


@contextlib.asynccontextmanager
async def fleet(folder: Path, clients: int) -> AsyncIterator[Fleet]:
    """Start everything and wait until all shards serve. The router admits ``clients`` requests at a time."""
    async with contextlib.AsyncExitStack() as stack:
        authority = trustme.CA()
        network = await stack.enter_async_context(namespace())
        host = "127.0.0.1" if isinstance(network, str) else network.host
        ports = stack.enter_context(kept_ports(2))
        local, remote = f"127.0.0.1:{ports[0]}", f"{host}:{ports[1]}"
        proxy = await stack.enter_async_context(LinkProxy(local))
        # The certificate of each shard has its address.
        secure = {
            address: tuple(
                write_certificate(folder, name, (address.partition(":")[0],), authority, authority).flags("--")
            )
            for name, address in (("local", local), ("remote", remote))
        }
        spots = [
            *(Spot(f"unix-{n}", f"unix:{folder}/{n}", ("--address", f"unix:{folder}/{n}")) for n in range(2)),
            Spot("proxied", proxy.address, ("--address", local, *secure[local]), proxy=proxy),
            Spot("remote", remote, ("--address", remote, *secure[remote])),
        ]
        if not isinstance(network, str):
            spots[3].network = network
        for spot in spots:
            stack.push_async_callback(spot.kill)
            await spot.start()
        shown = write_certificate(folder, "router", ("router",), authority, authority).flags("--shard-")
        listed = [word for spot in spots for word in ("--shard", spot.address)]
        # A permit that is not returned makes a later request fail. No request is to blame for what happens here.
        limits = ("--max-concurrent-requests", str(clients), "--max-request-losses", "100")
        flags = [*listed, *shown, *limits, "--handover", f"{folder}/handover"]
        started = Fleet(spots, [network] if isinstance(network, str) else [], folder, flags, stack)
        await started.start_router()
        assert await started.wait_until_all_serve(), started.routers[0].text
        yield started
