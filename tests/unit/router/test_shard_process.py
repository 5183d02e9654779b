"""Which ends of a shard end `caravan serve`, and after which it is started again."""

import asyncio
from pathlib import Path

import pytest

from caravan_router.serve import shard_process
from caravan_router.serve.shard_process import ShardProcess, ShardStartError
from caravan_testing.waiting import eventually


class Program:
    """A program that ends with each of ``codes`` in turn, and then runs until a signal."""

    def __init__(self, codes: list[int]) -> None:
        self._codes = codes
        self._stopped = asyncio.Event()
        self.returncode: int | None = None
        self.stderr = None
        self.starts = 0

    async def start(self, *_command: str, **_options: object) -> "Program":
        self.starts += 1
        return self

    async def wait(self) -> int:
        if self._codes:
            return self._codes.pop(0)
        await self._stopped.wait()
        return 0

    def send_signal(self, _signal: int) -> None:
        self._stopped.set()


class Endable(Program):
    """A program that runs until it is told how to end."""

    def __init__(self) -> None:
        super().__init__([])
        self._ends: asyncio.Queue[int] = asyncio.Queue()

    def end(self, code: int) -> None:
        self._ends.put_nowait(code)

    async def wait(self) -> int:
        return await self._ends.get()

    def send_signal(self, _signal: int) -> None:
        # Both `run` and `stop` wait.
        self.end(0)
        self.end(0)


def use(program: Program, monkeypatch: pytest.MonkeyPatch, socket: Path) -> ShardProcess:
    monkeypatch.setattr("asyncio.create_subprocess_exec", program.start)
    monkeypatch.setattr(shard_process, "_FIRST_BACKOFF_S", 0.001)
    return ShardProcess("shard-0", socket, [])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (2, "shard-0 could not start; its message is above"),
        (-6, "shard-0 ended with SIGABRT while it loaded its model"),
    ],
)
async def test_a_first_start_that_fails_is_the_only_one(
    code: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = Program([code])
    with pytest.raises(ShardStartError, match=message):
        await use(program, monkeypatch, tmp_path / "shard.sock").run()
    assert program.starts == 1


async def test_a_shard_that_has_run_is_started_until_it_can_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An rpc-server may die, take its shard along, and be back a while later."""
    (tmp_path / "shard.sock").touch()
    program = Program([-6, 2, -6, 2])
    shard = use(program, monkeypatch, tmp_path / "shard.sock")
    running = asyncio.create_task(shard.run())
    await eventually(lambda: program.starts == 5, "five starts")
    await shard.stop()
    await running


async def test_a_shard_is_starting_until_it_listens_unless_the_last_start_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shard_process, "_POLL_S", 0.001)
    socket = tmp_path / "shard.sock"
    program = Endable()
    shard = use(program, monkeypatch, socket)
    assert shard.is_starting
    running = asyncio.create_task(shard.run())
    await eventually(lambda: program.starts == 1)
    assert shard.is_starting
    await asyncio.to_thread(socket.touch)
    await eventually(lambda: not shard.is_starting, "it listens")
    # It is killed, which leaves the socket there.
    program.end(-9)
    await eventually(lambda: program.starts == 2 and shard.is_starting, "it loads its model again")
    program.end(2)
    await eventually(lambda: program.starts == 3, "it is tried again")
    assert not shard.is_starting
    await asyncio.to_thread(socket.touch)
    await eventually(lambda: shard._has_listened, "it listens after all")
    program.end(-9)
    await eventually(lambda: program.starts == 4 and shard.is_starting, "it is trusted again")
    await shard.stop()
    await running
    assert not shard.is_starting
