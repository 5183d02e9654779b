"""Break shards and their links at random under load; check that no client notices more than a pause.

PYTHONPATH=tests python -m chaos.chaos --minutes 10
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from caravan_studio.recording.lines import RecordingFile
from caravan_studio.replay.player import Player, play
from caravan_testing.oracle import Oracle
from chaos.faults import Disturber, Fault
from chaos.fleet import Fleet, fleet
from chaos.load import Lag, SteadyLoad, compare, held, late, make_asks, match_losses, table, undisturbed

_REST_S = 300.0
_LAG_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run. ``spare_s``: how much later than promised a loss may be noticed, because the machine is busy."""

    seconds: float
    seed: int
    clients: int = 8
    asks: int = 24
    longest: int = 100
    spare_s: float = 0.0
    router_log: Path | None = None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was wrong, and which faults were tried."""

    problems: list[str]
    faults: list[Fault]


async def run(plan: Plan) -> Outcome:
    """Carry out ``plan`` and print a summary."""
    chance = random.Random(plan.seed)
    asks = make_asks(plan.asks, plan.longest, chance)
    with tempfile.TemporaryDirectory() as folder:
        async with fleet(Path(folder), plan.clients) as started:
            for reason in started.without:
                _say(f"without faults of the network: {reason}")
            expected = await undisturbed(started.url, asks, plan.clients)
            load = SteadyLoad(started.url, asks, plan.clients, chance)
            disturber = Disturber(started, chance)
            lags: list[Lag] = []
            measuring = asyncio.create_task(_measure_lag(lags))
            loading = asyncio.create_task(load.run())
            await disturber.run(plan.seconds)
            load.stop.set()
            await loading
            measuring.cancel()
            problems = await _find_what_is_left(started)
            losses = started.losses()
            if plan.router_log is not None:
                plan.router_log.write_text("\n".join(router.text for router in started.routers))
        problems += _replay(started.recordings)
    noticed = match_losses(disturber.faults, losses)
    problems += late(noticed, lags, plan.spare_s)
    problems += [f"{fault} was not overcome" for fault in disturber.faults if not fault.overcome]
    oracle = Oracle()
    texts = compare(load.answers, expected, oracle)
    oracle.llama.close()
    _say(table(noticed, load.answers))
    tokens = sum(len(answer.tokens) for answer in load.answers)
    _say(f"{len(load.answers)} answers, {tokens} tokens; texts: {texts}")
    return Outcome(problems + texts.problems, disturber.faults)


def _replay(recordings: list[Path]) -> list[str]:
    """Play what the routers recorded again. Return where a decision is another one."""
    decisions = 0
    for path in recordings:
        for played in play(RecordingFile(path), Player()):
            decisions += len(played.decisions)
            if played.differences:
                kept = Path(tempfile.mkdtemp(prefix="caravan-chaos-")) / path.name
                for part in path.parent.glob(f"{path.name}*"):
                    shutil.copy(part, kept.parent)
                return [f"{kept}: call {played.number} decides otherwise when it is played again: {played.differences}"]
    _say(f"{len(recordings)} recordings, {decisions} decisions: all are the same when they are played again")
    return []


async def _measure_lag(lags: list[Lag]) -> None:
    """Note when this process does not run."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(_LAG_POLL_S)
        late_s = time.monotonic() - before - _LAG_POLL_S
        if late_s > _LAG_POLL_S:
            lags.append(Lag(time.time(), late_s))


async def _find_what_is_left(started: Fleet) -> list[str]:
    """Wait until all shards serve and hold nothing; return what is wrong after that."""
    problems = [] if await started.wait_until_all_serve() else ["not all shards serve at the end"]
    problems += [f"{name} has ended by itself" for name in started.shards_that_died()]
    ends = time.monotonic() + _REST_S
    while left := held(await started.metrics()):
        if time.monotonic() > ends:
            return problems + left
        await asyncio.sleep(0.2)
    return problems


def main() -> int:
    """Run the chaos test. Return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--router-log", type=Path, help="file for the router's log")
    arguments = parser.parse_args()
    _say(f"seed {arguments.seed}")
    plan = Plan(seconds=arguments.minutes * 60, seed=arguments.seed, router_log=arguments.router_log)
    problems = asyncio.run(run(plan)).problems
    for problem in problems:
        _say(f"WRONG: {problem}")
    _say("failed" if problems else "passed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
