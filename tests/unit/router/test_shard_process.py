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


def use(program: Program, monkeypatch: pytest.MonkeyPatch) -> ShardProcess:
    monkeypatch.setattr("asyncio.create_subprocess_exec", program.start)
    monkeypatch.setattr(shard_process, "_FIRST_BACKOFF_S", 0.001)
    return ShardProcess("shard-0", Path("shard.sock"), [])


async def test_a_first_start_with_a_wrong_configuration_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program([2])
    with pytest.raises(ShardStartError, match="shard-0"):
        await use(program, monkeypatch).run()
    assert program.starts == 1


async def test_a_shard_that_has_run_is_started_until_it_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An rpc-server may die, take its shard along, and be back a while later."""
    program = Program([-6, 2, 2])
    shard = use(program, monkeypatch)
    running = asyncio.create_task(shard.run())
    await eventually(lambda: program.starts == 4, "four starts")
    await shard.stop()
    await running
