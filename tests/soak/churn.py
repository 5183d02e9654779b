"""Send many short requests while shards join and leave; check that no request fails and the router does not grow.

PYTHONPATH=tests python -m soak.churn --requests 100000
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import ClientSession, TCPConnector

from caravan_testing.programs import Program, program, url_of
from soak.watch import resident_bytes

CLIENTS = 24
CHANGE_EVERY_S = 4.0
LEAST_SHARDS, MOST_SHARDS = 2, 5
# The router may grow by this share and amount from the second quarter of the run to the last one.
MEMORY_PART, MEMORY_BYTES = 0.03, 5 << 20
CPU_PART = 0.15
_SAMPLE_S = 2.0
_SHOWN_LINES = 60


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests answered so far, memory of the router, and its processor time, in seconds."""

    requests: int
    router_bytes: int
    cpu_s: float


@dataclass(slots=True)
class Shards:
    """Toy shards that come and go; ``listed`` is the file from which the router has their addresses."""

    folder: Path
    stack: contextlib.AsyncExitStack
    running: dict[str, Program] = field(default_factory=dict)
    started: int = 0

    @property
    def listed(self) -> Path:
        return self.folder / "shards"

    async def add(self) -> None:
        """Start a shard and list it."""
        address = f"unix:{self.folder}/{self.started}.sock"
        self.started += 1
        # As many saved prefixes as a real model would have in some GiB.
        toy = ("--backend", "fake", "-c", "16384", "-np", "8", "--cache-ram", "2")
        flags = (*toy, "--address", address, "--shard-id", f"s{self.started}")
        self.running[address] = await self.stack.enter_async_context(program("caravan_shard", *flags))
        self._write()

    def remove(self, chance: random.Random) -> None:
        """Let a shard end: by SIGTERM, or by its address, which is no longer listed, and SIGTERM later."""
        address = chance.choice(list(self.running))
        leaving = self.running.pop(address)
        self._write()
        delay_s = chance.choice([0.0, 1.0])
        asyncio.get_running_loop().call_later(delay_s, _terminate, leaving)

    def _write(self) -> None:
        new = self.listed.with_suffix(".new")
        new.write_text("".join(f"{address}\n" for address in self.running))
        new.replace(self.listed)


def _terminate(shard: Program) -> None:
    with contextlib.suppress(ProcessLookupError):
        shard.process.send_signal(signal.SIGTERM)


@dataclass(slots=True)
class Tally:
    """What clients saw."""

    wanted: int
    answered: int = 0
    errors: list[str] = field(default_factory=list)


async def _client(number: int, url: str, tally: Tally) -> None:
    chance = random.Random(number)
    # Some clients make a connection for each request.
    async with ClientSession(connector=TCPConnector(force_close=number % 4 == 0)) as session:
        while tally.answered < tally.wanted:
            prompt = "".join(chance.choices("abcdefgh ", k=chance.randrange(4, 80)))
            body = {"inputs": prompt, "parameters": {"max_new_tokens": chance.randrange(1, 6)}}
            async with session.post(f"{url}/generate", json=body) as response:
                text = await response.text()
            tally.answered += 1
            if response.status != 200:
                tally.errors.append(f"{response.status} {text[:200]}")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def judge(samples: Sequence[Sample]) -> list[str]:
    """Return how memory or processor time per request grew from the second quarter of ``samples`` to the last."""
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    before, after = (statistics.median(one.router_bytes for one in part) for part in (second, last))
    costs = [(part[-1].cpu_s - part[0].cpu_s) / (part[-1].requests - part[0].requests) for part in (second, last)]
    _say(f"memory of the router {before / (1 << 20):.1f} -> {after / (1 << 20):.1f} MiB")
    _say(f"processor time per request {1e3 * costs[0]:.2f} -> {1e3 * costs[1]:.2f} ms")
    problems = []
    if after > before * (1 + MEMORY_PART) + MEMORY_BYTES:
        problems.append("the router's memory grew")
    if costs[1] > costs[0] * (1 + CPU_PART):
        problems.append("requests cost more and more")
    return problems


async def churn(requests: int, seed: int) -> list[str]:
    """Carry out the run; return what was wrong."""
    chance = random.Random(seed)
    tally = Tally(requests)
    samples: list[Sample] = []
    async with contextlib.AsyncExitStack() as stack:
        shards = Shards(Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
        for _ in range(LEAST_SHARDS):
            await shards.add()
        flags = ("--shard", f"file:{shards.listed}", "--shard-refresh-s", "0.5", "--port", "0")
        router = await stack.enter_async_context(program("caravan_serve", "router", *flags))
        url = await url_of(router)
        clients = [asyncio.create_task(_client(number, url, tally)) for number in range(CLIENTS)]
        changed = reported = time.monotonic()
        while not all(client.done() for client in clients):
            await asyncio.sleep(_SAMPLE_S)
            if router.process.returncode is not None or any(client.done() and client.exception() for client in clients):
                raise RuntimeError("the router failed:\n" + "\n".join(router.log[-_SHOWN_LINES:]))
            pid = router.process.pid
            samples.append(Sample(tally.answered, resident_bytes(pid), _cpu_s(pid)))
            # The access log would fill the memory.
            router.log[:] = router.find("WARNING|ERROR|Error|Traceback|^ ")
            now = time.monotonic()
            if now - changed >= CHANGE_EVERY_S:
                changed = now
                grows = len(shards.running) <= LEAST_SHARDS or (
                    len(shards.running) < MOST_SHARDS and chance.random() < 0.5
                )
                if grows:
                    await shards.add()
                else:
                    shards.remove(chance)
            if now - reported >= 30:
                reported = now
                _say(f"{tally.answered} requests, {len(tally.errors)} errors, {shards.started} shards so far")
    _say(f"{tally.answered} requests, {len(tally.errors)} errors, {shards.started} shards")
    return [*tally.errors[:10], *judge(samples)]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run. Return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    _say(f"seed {arguments.seed}")
    problems = asyncio.run(churn(arguments.requests, arguments.seed))
    for problem in problems:
        _say(f"WRONG: {problem}")
    _say("failed" if problems else "passed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
