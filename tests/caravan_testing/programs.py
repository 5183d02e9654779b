"""A router and shards as processes of their own, as they run on several hosts."""

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from caravan_testing.waiting import eventually


@dataclass
class Program:
    """A running process and the lines that it has written so far."""

    process: asyncio.subprocess.Process
    log: list[str] = field(default_factory=list)

    def find(self, pattern: str) -> list[str]:
        """Return the lines so far in which ``pattern`` occurs."""
        return [line for line in self.log if re.search(pattern, line)]

    async def logged(self, pattern: str) -> re.Match[str]:
        """Wait until ``pattern`` occurs in a line; fail if the process ends before."""

        def look() -> tuple[re.Match[str] | None, str]:
            return next((found for line in self.log if (found := re.search(pattern, line))), None), self.text

        def ended() -> str:
            return "" if self.process.returncode is None else f"it has ended with {self.process.returncode}"

        found, _ = await eventually(look, f"{pattern!r} is logged", lambda seen: seen[0] is not None, unless=ended)
        assert found is not None
        return found

    @property
    def text(self) -> str:
        """All lines so far."""
        return "\n".join(self.log)


@contextlib.asynccontextmanager
async def program(module: str, *arguments: str, before: tuple[str, ...] = ()) -> AsyncIterator[Program]:
    """Run ``python -m module`` with ``arguments``; kill it at the end if it still runs.

    ``before``: a command that replaces itself by the one that follows it, such as ``ip netns exec``.
    """
    process = await asyncio.create_subprocess_exec(
        *(*before, sys.executable, "-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    running = Program(process)
    reading = asyncio.create_task(_read(running))
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading


async def _read(running: Program) -> None:
    assert running.process.stdout is not None
    async for line in running.process.stdout:
        running.log.append(line.decode(errors="replace").rstrip())


async def address_of(shard: Program) -> str:
    """Wait until the shard listens, and return its address."""
    return (await shard.logged(r"listening address=(\S+)"))[1]


async def url_of(router: Program) -> str:
    """Wait until the router listens, and return its URL."""
    return (await router.logged(r"listening url=(\S+)"))[1]


@contextlib.contextmanager
def kept_ports(count: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Return free ports that nothing else gets meanwhile.

    They stay bound here without listening, so that the kernel gives them to no other socket. Programs that set
    SO_REUSEADDR, as servers do, can bind them nevertheless, again and again.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for kept in sockets:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind((host, 0))
        yield [kept.getsockname()[1] for kept in sockets]


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's children; none if it has ended."""
    found: list[int] = []
    # Threads and processes end meanwhile.
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text().split())
    return found


def children_with(word: str, pid: int | None = None) -> list[int]:
    """Return the ids of the children of a process, this one by default, that have ``word`` in their command line."""
    return [child for child in children_of(pid or os.getpid()) if word in command_line(child)]


def command_line(pid: int) -> str:
    """Return that of a process; nothing if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


_CONFIGURATION = """
daemon off;
{user}
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {http}
}}
"""


def configuration(folder: Path, http: str) -> str:
    """Return a configuration whose files are in ``folder``, with ``http`` in its block of that name."""
    # As root, nginx would work as a user that cannot write what is large there.
    user = "user root;" if os.getuid() == 0 else ""
    return _CONFIGURATION.format(folder=folder, http=http, user=user)


def status_of(main: Callable[[], int]) -> object:
    """Return the status with which a program ends whose function this is."""
    try:
        return main()
    except SystemExit as ended:
        return ended.code
