"""Measures the CPU time of the scheduler for one step of a shard, by shards and queued requests. Not run by the tests.

``python tests/bench/plan_cost.py``: each shard decodes up to 32 sequences; requests whose prompts share 600 tokens with
19 others keep the queue full. Shards are played by a loop in virtual time, which costs nothing. Prints CPU
microseconds per step, the share of prompt tokens that were cached, and output tokens per virtual second and shard: the
last two show whether a cheaper plan is a worse one.
"""

import argparse
import heapq
import random
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from caravan_router.core.sampling import FinishReason
from caravan_router.core.tokens import GeneratedToken
from caravan_router.scheduling.actions import Command, Decode, Deliver, FilterBatch, Load, Prefill, Save, Start
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import (
    CommandEnded,
    Event,
    LayoutLimits,
    Loaded,
    Saved,
    Saving,
    ShardJoined,
    ShardLimits,
    StepOutcome,
    Stepped,
    Submitted,
)
from caravan_router.scheduling.scheduler import Scheduler
from caravan_testing.requests import request

PREFIX_TOKENS = 600
REQUESTS_PER_PREFIX = 20
OWN_TOKENS = 20
STEP_S = 0.025
PROMPT_TOKEN_S = 0.0002
TOKEN = GeneratedToken(1234, b" word", False, None, (), None)
LAST_TOKEN = GeneratedToken(1234, b" word", False, None, (), FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``cells``: of each shard, shared by its sequences."""

    shards: int
    queued: int
    sequences: int
    cells: int
    saves: bool = False
    mixed_lengths: bool = False


class PlayedShard:
    """Answers commands without checking them; `caravan_testing.model_shard` does that, and takes longer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._commands: deque[Command] = deque()
        self._steps = 0
        self._tokens_left: dict[int, int] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._commands)

    def send(self, command: Command) -> None:
        self._commands.append(command)

    def advance(self) -> tuple[float, list[Event]]:
        """Run one step. Return its seconds and what the scheduler hears."""
        command = self._commands[0]
        match command:
            case Prefill():
                return self._prefill(command)
            case Decode():
                return self._decode(command)
            case Save():
                saved = tuple(True for _ in command.entries)
                sizes = tuple(entry.cuts[-1][0] - entry.start for entry in command.entries)
                answer = Saved(
                    shard=self.name, command_id=command.command_id, saved=saved, sizes_bytes=sizes, seconds=0.001
                )
                return 0.001, [answer, self._end()]
            case Load():
                loaded = tuple(True for _ in command.entries)
                reply = Loaded(
                    shard=self.name, command_id=command.command_id, loaded=loaded, bad_runs=(), seconds=0.001
                )
                return 0.001, [reply, self._end()]
            case FilterBatch():
                return 0.001, [self._end()]
            case _:
                raise NotImplementedError(command)

    def _end(self) -> CommandEnded:
        self._steps = 0
        return CommandEnded(self.name, self._commands.popleft().command_id)

    def _prefill(self, command: Prefill) -> tuple[float, list[Event]]:
        for chunk in command.chunks:
            if chunk.setup is not None:
                self._tokens_left[chunk.sequence_id] = chunk.setup.stopping.max_new_tokens
        ids = [*(chunk.sequence_id for chunk in command.chunks if chunk.last), *command.ride]
        seconds = STEP_S + PROMPT_TOKEN_S * sum(len(chunk.token_ids) for chunk in command.chunks)
        return seconds, [self._stepped(command, self._sample(ids), seconds), self._end()]

    def _decode(self, command: Decode) -> tuple[float, list[Event]]:
        self._steps += 1
        tokens = self._sample(command.sequence_ids)
        events: list[Event] = [self._stepped(command, tokens, STEP_S)] if tokens else []
        if not tokens or len(self._commands) > 1 or self._steps >= command.max_steps:
            events.append(self._end())
        return STEP_S, events

    def _sample(self, ids: Iterable[int]) -> tuple[tuple[int, GeneratedToken], ...]:
        tokens = []
        for sequence_id in ids:
            left = self._tokens_left[sequence_id] = self._tokens_left[sequence_id] - 1
            if left >= 0:
                tokens.append((sequence_id, LAST_TOKEN if left == 0 else TOKEN))
        return tuple(tokens)

    def _stepped(self, command: Command, tokens: tuple[tuple[int, GeneratedToken], ...], seconds: float) -> Stepped:
        return Stepped(
            shard=self.name, command_id=command.command_id, outcome=StepOutcome.OK, tokens=tokens, seconds=seconds
        )


class Fleet:
    """Plays shards and clients of one scheduler, in the order of a virtual clock."""

    def __init__(self, case: Case, seed: int, scheduler: Scheduler | None = None) -> None:
        self._case = case
        self._random = random.Random(seed)
        self._scheduler = scheduler or Scheduler(SchedulerConfig())
        self._shards = {f"shard-{number:03}": PlayedShard(f"shard-{number:03}") for number in range(case.shards)}
        # When each busy shard has done its step, and what it then reports.
        self._due: list[tuple[float, str, list[Event]]] = []
        self._stepping: set[str] = set()
        self._submitted = 0
        self._prefix: tuple[int, ...] = ()
        self.now_s = 0.0
        self.cpu_s = 0.0
        self.steps = self.output_tokens = self.prompt_tokens = self.cached_tokens = 0

    def begin(self) -> None:
        """Let the shards join and fill up."""
        layout = LayoutLimits(
            cells=self._case.cells,
            cells_per_sequence=self._case.cells,
            saving=Saving.ANY if self._case.saves else Saving.NOTHING,
        )
        limits = ShardLimits(
            layout=layout,
            max_sequences=self._case.sequences,
            max_batch_tokens=2048,
            memory_bytes=10**9 if self._case.saves else 0,
        )
        self._handle([ShardJoined(name, limits) for name in self._shards])
        while len(self._scheduler.waiting) < self._case.queued:
            self._handle([self._submission()])

    def run(self, steps: int) -> None:
        """Play so many steps, of all shards together."""
        until = self.steps + steps
        while self.steps < until:
            self.now_s, name, events = heapq.heappop(self._due)
            self._stepping.remove(name)
            self._handle(events)
            self.steps += any(isinstance(event, Stepped) for event in events)
            while len(self._scheduler.waiting) < self._case.queued:
                self._handle([self._submission()])

    def forget_figures(self) -> None:
        """Start to measure."""
        self.cpu_s = 0.0
        self.steps = self.output_tokens = self.prompt_tokens = self.cached_tokens = 0

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

    def _handle(self, events: list[Event]) -> None:
        began = time.process_time()
        actions = self._scheduler.handle(events, self.now_s)
        self.cpu_s += time.process_time() - began
        for action in actions:
            if isinstance(action, Deliver):
                self.output_tokens += len(action.tokens)
            elif isinstance(action, Start):
                self.prompt_tokens += action.prompt_tokens
                self.cached_tokens += action.cached_tokens
            elif isinstance(action, Prefill | Decode | FilterBatch | Save | Load):
                self._shards[action.shard].send(action)
                self._step(action.shard)
        for event in events:
            if isinstance(event, CommandEnded | Stepped):
                self._step(event.shard)

    def _step(self, name: str) -> None:
        """Let a shard that has something to do and is doing nothing run a step."""
        shard = self._shards[name]
        if shard.is_busy and name not in self._stepping:
            seconds, events = shard.advance()
            self._stepping.add(name)
            heapq.heappush(self._due, (self.now_s + seconds, name, events))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """``step_us``: CPU time of a step in microseconds, on average."""

    step_us: float
    cached_share: float
    shard_tokens_per_s: float


def measure(case: Case, *, warm_up: int, steps: int, seed: int) -> Result:
    """Return what was seen in ``steps`` steps of each shard, after ``warm_up`` steps of each."""
    fleet = Fleet(case, seed)
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
