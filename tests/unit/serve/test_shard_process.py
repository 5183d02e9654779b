"""A shard as a child process, and requests that wait for it while it starts."""

import asyncio
import math
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from caravan_scheduler.core.shards import ShardReport, ShardStanding, ShardState
from caravan_serve import shard_process
from caravan_serve.shard_process import ShardProcess, ShardStartError
from caravan_serve.starting import Starting
from caravan_testing.waiting import eventually

GRACE_S = 30.0


class Program:
    """A program that ends with each of ``codes`` in turn, and then runs until a signal. ``listens``: each time."""

    def __init__(self, codes: list[int], *, listens: bool = False) -> None:
        self._listens = listens
        self._codes = codes
        self._stopped = asyncio.Event()
        self.returncode: int | None = None
        self.stderr = None
        self.starts = 0

    async def start(self, *_command: str, pass_fds: tuple[int], **_options: object) -> "Program":
        self.starts += 1
        self._ready = os.dup(pass_fds[0])
        os.set_blocking(self._ready, False)
        if self._listens:
            self.listen()
        return self

    def listen(self) -> None:
        os.write(self._ready, b"\n")
        os.close(self._ready)

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
    program = Program([-6, 2, -6, 2], listens=True)
    shard = use(program, monkeypatch, tmp_path / "shard.sock")
    running = asyncio.create_task(shard.run())
    await eventually(lambda: program.starts == 5, "five starts")
    await shard.stop()
    await running


async def test_a_shard_is_starting_until_it_listens_unless_the_last_start_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = Endable()
    shard = use(program, monkeypatch, tmp_path / "shard.sock")
    assert shard.is_starting
    running = asyncio.create_task(shard.run())
    await eventually(lambda: program.starts == 1)
    assert shard.is_starting
    program.listen()
    await eventually(lambda: not shard.is_starting, "it listens")
    program.end(-9)
    await eventually(lambda: program.starts == 2 and shard.is_starting, "it loads its model again")
    program.end(2)
    await eventually(lambda: program.starts == 3, "it is tried again")
    assert not shard.is_starting
    program.listen()
    await eventually(lambda: shard.listens, "it listens after all")
    program.end(-9)
    await eventually(lambda: program.starts == 4 and shard.is_starting, "it is trusted again")
    await shard.stop()
    await running
    assert not shard.is_starting


@pytest.mark.parametrize("code", [-signal.SIGSEGV, -signal.SIGABRT, -(signal.SIGRTMIN + 3), 2, 1])
async def test_no_end_of_a_shard_that_has_listened_is_a_failed_start(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has no socket any more, and lived too short to be seen listening before it ended."""
    program = Program([code], listens=True)
    shard = use(program, monkeypatch, tmp_path / "shard.sock")
    running = asyncio.create_task(shard.run())
    await eventually(lambda: program.starts == 2, "it is started again")
    await shard.stop()
    await running


async def test_a_process_that_cannot_be_made_is_tried_again_once_one_has_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = Program([-signal.SIGKILL], listens=True)
    shard = use(program, monkeypatch, tmp_path / "shard.sock")
    attempts = 0

    async def start(*command: str, pass_fds: tuple[int], **options: object) -> Program:
        nonlocal attempts
        attempts += 1
        if attempts in (2, 3):
            raise OSError(12, "Cannot allocate memory")
        return await program.start(*command, pass_fds=pass_fds, **options)

    monkeypatch.setattr("asyncio.create_subprocess_exec", start)
    running = asyncio.create_task(shard.run())
    await eventually(lambda: program.starts == 2, "it is started again")
    assert attempts == 4
    await shard.stop()
    await running


async def test_a_first_process_that_cannot_be_made_is_a_failed_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shard = use(Program([]), monkeypatch, tmp_path / "shard.sock")

    async def start(*_command: str, **_options: object) -> Program:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("asyncio.create_subprocess_exec", start)
    with pytest.raises(ShardStartError, match="shard-0 could not start: Cannot allocate memory"):
        await shard.run()


@dataclass
class Shard:
    address: str
    is_starting: bool = True


@dataclass
class Models:
    """Stands in for the fleet: states of shards by address, and how long requests wait by the name of their model."""

    states: dict[str, tuple[ShardState, str]] = field(default_factory=dict)
    patience: dict[str, float] = field(default_factory=dict)

    def shards(self) -> list[ShardReport]:
        return [
            ShardReport(address=address, standing=ShardStanding(state=state, since_s=0.0), epoch=0, model=model)
            for address, (state, model) in self.states.items()
        ]

    @property
    def demand(self) -> "Models":
        return self

    def set_absence(self, name: str, absence: Any) -> None:
        self.patience[name] = absence.grace_s


def starting(models: Models, shards: dict[str, list[Shard]]) -> Starting:
    return Starting(cast("Any", models), cast("Any", shards), GRACE_S)


def test_requests_wait_until_the_router_holds_the_shard() -> None:
    models, shard = Models({"a": (ShardState.JOINING, "")}), Shard("a")
    watch = starting(models, {"": [shard]})
    watch.update(0.0)
    watch.update(1000.0)
    assert models.patience == {"": math.inf}
    shard.is_starting = False
    watch.update(1029.0)
    assert models.patience == {"": math.inf}, "it listens, and has not joined yet"
    models.states["a"] = (ShardState.SERVING, "chat")
    watch.update(1029.5)
    assert models.patience == {"": GRACE_S}


def test_the_restart_of_a_shard_counts_for_the_name_of_its_model_too() -> None:
    models, shard = Models({"a": (ShardState.SERVING, "chat")}), Shard("a", is_starting=False)
    watch = starting(models, {"": [shard]})
    watch.update(0.0)
    assert models.patience == {}
    models.states["a"] = (ShardState.LOST, "chat")
    shard.is_starting = True
    watch.update(1.0)
    assert models.patience == {"": math.inf, "chat": math.inf}
    models.states["a"] = (ShardState.SERVING, "chat")
    shard.is_starting = False
    watch.update(2.0)
    assert models.patience == {"": GRACE_S, "chat": GRACE_S}


def test_a_shard_that_listens_and_never_joins_is_not_waited_for_for_ever() -> None:
    models, shard = Models({"a": (ShardState.JOINING, "")}), Shard("a")
    watch = starting(models, {"": [shard]})
    watch.update(0.0)
    shard.is_starting = False
    watch.update(29.0)
    assert models.patience == {"": math.inf}
    watch.update(30.0)
    assert models.patience == {"": GRACE_S}


def test_each_model_is_waited_for_by_itself() -> None:
    models = Models({"a": (ShardState.SERVING, "x"), "b": (ShardState.JOINING, ""), "c": (ShardState.JOINING, "")})
    first, second, third = Shard("a", is_starting=False), Shard("b"), Shard("c")
    watch = starting(models, {"x": [first], "y": [second, third]})
    watch.update(0.0)
    assert models.patience == {"y": math.inf}
    second.is_starting = False
    models.states["b"] = (ShardState.SERVING, "y")
    watch.update(1.0)
    assert models.patience == {"y": math.inf}, "one serves, and the other one may be needed"
    third.is_starting = False
    models.states["c"] = (ShardState.SERVING, "y")
    watch.update(2.0)
    assert models.patience == {"y": GRACE_S}
