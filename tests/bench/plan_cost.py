"""Measures the CPU time of the scheduler for one step of a shard, by shards and queued requests. Not run by the tests.

``python tests/bench/plan_cost.py``: each shard decodes up to 32 sequences; requests whose prompts share 600 tokens with
19 others keep the queue full. Shards are played by a loop in virtual time, which costs nothing. Prints CPU
microseconds per step, the share of prompt tokens that were cached, and output tokens per virtual second and shard: the
last two show whether a cheaper plan is a worse one.
"""

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.simulate.simulation import StepTimes
from caravan_proto.messages.limits import LayoutLimits, Saving
from caravan_scheduler.actions import Action, Deliver, Start
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import ShardLimits, Submitted
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.replay.played_shard import PlayedShard
from caravan_studio.replay.virtual_fleet import Fleet, Member
from caravan_testing.requests import request

PREFIX_TOKENS = 600
REQUESTS_PER_PREFIX = 20
OWN_TOKENS = 20
# A step takes 25 ms and 0.2 ms more for each prompt token.
TIMES = StepTimes(decode=((0, 0.025), (1, 0.025)), prompt=((0, 0.0), (1, 0.0002)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``cells``: of each shard, shared by its sequences."""

    shards: int
    queued: int
    sequences: int
    cells: int
    saves: bool = False
    mixed_lengths: bool = False


class FullFleet:
    """A fleet whose queue is kept full."""

    def __init__(self, case: Case, seed: int, scheduler: Scheduler | None = None) -> None:
        self._case = case
        self._random = random.Random(seed)
        self._scheduler = scheduler or Scheduler(SchedulerConfig())
        layout = LayoutLimits(
            cells=case.cells, cells_per_sequence=case.cells, saving=Saving.ANY if case.saves else Saving.NOTHING
        )
        limits = ShardLimits(
            layout=layout,
            max_sequences=case.sequences,
            max_batch_tokens=2048,
            memory_bytes=10**9 if case.saves else 0,
        )
        members = [Member(PlayedShard(f"shard-{number:03}", TIMES), limits, 0) for number in range(case.shards)]
        self._fleet = Fleet([self._scheduler], members, self._hear)
        self._submitted = 0
        self._prefix: tuple[int, ...] = ()
        self.output_tokens = self.prompt_tokens = self.cached_tokens = 0

    @property
    def now_s(self) -> float:
        return self._fleet.now_s

    @property
    def steps(self) -> int:
        return self._fleet.steps

    @property
    def cpu_s(self) -> float:
        return self._fleet.cpu_s

    def begin(self) -> None:
        """Let the shards join and fill up."""
        self._fleet.begin()
        self._fill_queue()

    def run(self, steps: int) -> None:
        """Play so many steps, of all shards together."""
        until = self.steps + steps
        while self.steps < until:
            self._fleet.step()
            self._fill_queue()

    def forget_figures(self) -> None:
        """Start to measure."""
        self._fleet.cpu_s = 0.0
        self._fleet.steps = 0
        self.output_tokens = self.prompt_tokens = self.cached_tokens = 0

    def _fill_queue(self) -> None:
        while len(self._scheduler.waiting) < self._case.queued:
            self._fleet.handle([self._submission()])

    def _submission(self) -> Submitted:
        if self._submitted % REQUESTS_PER_PREFIX == 0:
            self._prefix = self._words(PREFIX_TOKENS)
        self._submitted += 1
        prompt = self._prefix + self._words(OWN_TOKENS)
        if self._case.mixed_lengths:
            prompt = prompt[: self._random.choice((PREFIX_TOKENS // 10, PREFIX_TOKENS))] + prompt[PREFIX_TOKENS:]
        return Submitted(
            request(self._submitted, prompt, self._random.randint(50, 150), ignore_eos=True, arrived_s=self.now_s)
        )

    def _words(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(1000, 50_000) for _ in range(count))

    def _hear(self, now_s: float, action: Action) -> None:
        if isinstance(action, Deliver):
            self.output_tokens += len(action.tokens)
        elif isinstance(action, Start):
            self.prompt_tokens += action.prompt_tokens
            self.cached_tokens += action.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """``step_us``: CPU time of a step in microseconds, on average."""

    step_us: float
    cached_share: float
    shard_tokens_per_s: float


def measure(case: Case, *, warm_up: int, steps: int, seed: int) -> Result:
    """Return what was seen in ``steps`` steps of each shard, after ``warm_up`` steps of each."""
    fleet = FullFleet(case, seed)
    fleet.begin()
    fleet.run(warm_up * case.shards)
    fleet.forget_figures()
    began_s = fleet.now_s
    fleet.run(steps * case.shards)
    return Result(
        step_us=fleet.cpu_s / fleet.steps * 1e6,
        cached_share=fleet.cached_tokens / max(1, fleet.prompt_tokens),
        shard_tokens_per_s=fleet.output_tokens / (fleet.now_s - began_s) / case.shards,
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 20, 100])
    parser.add_argument("--queued", type=int, nargs="+", default=[10, 500, 2000])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--cells", type=int, default=40_000)
    parser.add_argument("--saves", action="store_true", help="shards have host memory for saved prefixes")
    parser.add_argument("--mixed-lengths", action="store_true", help="half of the prompts are a tenth as long")
    parser.add_argument("--warm-up", type=int, default=60, help="steps of each shard that are not measured")
    parser.add_argument("--steps", type=int, default=100, help="steps of each shard that are measured")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of which the one that took the least CPU time is printed"
    )
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print("shards  queued   us/step   cached %   tokens/s/shard")
    for shards in given.shards:
        for queued in given.queued:
            case = Case(
                shards=shards,
                queued=queued,
                sequences=given.sequences,
                cells=given.cells,
                saves=given.saves,
                mixed_lengths=given.mixed_lengths,
            )
            # Each round plays the same steps: what differs is what else the machine did.
            rounds = [
                measure(case, warm_up=given.warm_up, steps=given.steps, seed=given.seed) for _ in range(given.rounds)
            ]
            seen = min(rounds, key=lambda result: result.step_us)
            print(
                f"{shards:6}  {queued:6}  {seen.step_us:8.0f}  {100 * seen.cached_share:9.1f}"
                f"  {seen.shard_tokens_per_s:15.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
