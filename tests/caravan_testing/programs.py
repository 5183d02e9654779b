"""A router and shards as processes of their own, as they run on several hosts."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

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
