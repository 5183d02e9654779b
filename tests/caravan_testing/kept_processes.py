"""Has the routers of tests take over each other's processes, each of which takes 0.1 to 0.3 s to start.

A process of asyncio ends with its event loop, and each test has a loop of its own. These do not.
"""

import asyncio
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from caravan_dialects import guarded_process
from caravan_dialects.guarded_process import GuardedProcesses, Worker


class KeptProcess:
    """Stands for an asyncio.subprocess.Process: what a router uses of it, with pipes that belong to one event loop."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid
        self._close: list[Callable[[], None]] = []
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None

    @classmethod
    def start(cls, worker: Worker) -> "KeptProcess":
        """Start one."""
        command = [sys.executable, "-m", worker.module, str(worker.time_limit_s)]
        pipe = subprocess.PIPE
        return cls(subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True))

    @property
    def returncode(self) -> int | None:
        """How it ended, as of asyncio."""
        return self._process.poll()

    async def attach(self) -> None:
        """Open pipes of the running loop."""
        loop = asyncio.get_running_loop()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        self.stdout = reader = asyncio.StreamReader()
        reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), _copy(stdout, "rb"))
        writing, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, _copy(stdin, "wb"))
        self.stdin = asyncio.StreamWriter(writing, protocol, None, loop)
        self._close = [reading.close, writing.close]

    def detach(self) -> None:
        """Close the pipes of the running loop, but not those of the process."""
        for close in self._close:
            close()
        self._close = []

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    async def wait(self) -> int:
        """Return how it ended, once it has."""
        return await asyncio.to_thread(self._process.wait)

    async def communicate(self) -> None:
        """Wait for the end of a process that was killed, and close its pipes."""
        await self.wait()
        self.detach()
        self.close()

    def close(self) -> None:
        """End it, whether or not a loop runs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _copy(pipe: Any, mode: str) -> Any:
    return os.fdopen(os.dup(pipe.fileno()), mode, 0)


@pytest.fixture(scope="session")
def idle_processes() -> Iterator[dict[Worker, list[KeptProcess]]]:
    """What the routers of earlier tests have left."""
    idle: dict[Worker, list[KeptProcess]] = defaultdict(list)
    yield idle
    for processes in idle.values():
        for process in processes:
            process.close()


@pytest.fixture(autouse=True)
def kept_processes(idle_processes: dict[Worker, list[KeptProcess]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a router begin with processes of the one before, and leave its own."""

    async def start(self: GuardedProcesses) -> Any:
        idle = idle_processes[self._worker]
        if not idle:
            # Where a request is cancelled meanwhile, the next one gets it.
            await asyncio.to_thread(lambda: idle.append(KeptProcess.start(self._worker)))
        process = idle.pop()
        try:
            await process.attach()
        except BaseException:
            process.close()
            raise
        return process

    async def close(self: GuardedProcesses) -> None:
        self._closed = True
        while self._idle:
            process: Any = self._idle.pop()
            process.detach()
            if process.returncode is None:
                idle_processes[self._worker].append(process)
            else:
                process.close()

    monkeypatch.setattr(guarded_process.GuardedProcesses, "_start", start)
    monkeypatch.setattr(guarded_process.GuardedProcesses, "close", close)
