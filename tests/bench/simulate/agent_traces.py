"""Sessions of agents: recorded ones, and synthetic ones that are deterministic by their seed.

A session is a job. Its next request comes some time after the answer to the one before, and begins with all of that.
"""

import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 2_000, 50_000


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session: how long after the answer before it comes, in seconds, and what it adds to the prompt.

    ``new_tokens`` are those of ``blocks``, of which the last one may be cut. ``output_tokens``: of the answer.
    ``calls_tools``: whether the answer does, which the router sees.
    """

    delay_s: float
    new_tokens: int
    blocks: tuple[int, ...]
    output_tokens: int
    calls_tools: bool = False

    def words(self) -> tuple[int, ...]:
        """Return the tokens that it adds, which are made up for each block."""
        tokens: list[int] = []
        for block in self.blocks:
            tokens += random.Random(block).choices(range(_FIRST_TOKEN_ID, _LAST_TOKEN_ID), k=BLOCK_TOKENS)
        return tuple(tokens[: self.new_tokens])


@dataclass(frozen=True, slots=True)
class Session:
    """A job, which begins at ``start_s``. ``name``: what its requests name as their session; empty if they do not."""

    name: str
    start_s: float
    turns: tuple[Turn, ...]


def read_sessions(path: Path, *, speed: float = 1.0) -> tuple[Session, ...]:
    """Return the sessions of ``path``, by when they begin; ``speed`` times as fast as they were recorded.

    Reads JSON lines with the fields of [Mooncake](https://github.com/kvcache-ai/Mooncake), and what AIPerf's
    ``synthesize agentic-code`` writes: there, the lines of a ``session_id`` follow each other, lengths and hashes are
    those of what a line adds, and all but the first have a ``delay`` in ms after the answer. A line without
    ``session_id`` is a session of its own, without a name, and has its whole prompt. Raises ValueError with the line
    that has neither a ``timestamp`` nor a session that began before.
    """
    # By session, or by line where none is named.
    turns: dict[str | int, list[Turn]] = {}
    starts: dict[str | int, float] = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if not text.strip():
            continue
        line = json.loads(text)
        key = line.get("session_id") or number
        if key not in turns:
            if "timestamp" not in line:
                raise ValueError(f"{path}, line {number}: session {key!r} begins without a timestamp")
            starts[key] = line["timestamp"] / 1000 / speed
            turns[key] = []
        turns[key].append(_turn(line, speed))
    found = (Session(key if isinstance(key, str) else "", starts[key], tuple(turns[key])) for key in turns)
    return tuple(sorted(found, key=lambda session: session.start_s))


def _turn(line: dict[str, Any], speed: float) -> Turn:
    return Turn(
        delay_s=line.get("delay", 0.0) / 1000 / speed,
        new_tokens=line["input_length"],
        blocks=tuple(line["hash_ids"]),
        output_tokens=max(1, line["output_length"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoad:
    """How many sessions begin within the first ``spread_s`` seconds, and what they are like.

    The defaults are those of AIPerf 0.13 (``agentic_code_gen/configs/default.json``). Lengths are in tokens, delays in
    seconds. ``scale`` multiplies all lengths.
    """

    agents: int
    seed: int
    spread_s: float = 60.0
    scale: float = 1.0
    shared: int = 32_000
    max_prompt: int = 167_000
    own: "Lognormal"
    new: "Lognormal"
    output: "Lognormal"
    tool_share: float = 0.7
    tool_delay: "Lognormal"
    human_delay: "Lognormal"
    reset: float = 0.01
    reset_scaling: float = 1.5


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal distribution by its ``median`` and ``mean``; drawn again while more than ``most``."""

    median: float
    mean: float
    most: float = math.inf

    def draw(self, source: random.Random) -> float:
        """Draw a value."""
        sigma = math.sqrt(2 * math.log(self.mean / self.median))
        while True:
            value = self.median * math.exp(sigma * source.gauss(0.0, 1.0))
            if value <= self.most:
                return value


def agentic_code(agents: int, seed: int, *, spread_s: float = 60.0, scale: float = 1.0) -> AgentLoad:
    """Return a load like that of AIPerf's ``synthesize agentic-code --config default``."""
    return AgentLoad(
        agents=agents,
        seed=seed,
        spread_s=spread_s,
        scale=scale,
        own=Lognormal(5_000, 15_000, 30_000),
        new=Lognormal(6_600, 6_600, 10_000),
        output=Lognormal(1_000, 1_000, 1_500),
        tool_delay=Lognormal(1.8, 2.5, 10.0),
        human_delay=Lognormal(25.0, 40.0, 120.0),
    )


def synthesize(load: AgentLoad) -> tuple[Session, ...]:
    """Return the sessions of ``load``.

    Each begins with what all share and a prefix of its own. Seven of ten delays are those of a tool, the others those
    of a human; both get shorter as the context grows. A session ends at random, or where its context does not fit.
    """
    source = random.Random(load.seed)
    blocks = _Blocks(round(load.shared * load.scale))
    sessions = [_session(load, source, blocks, number) for number in range(load.agents)]
    return tuple(sorted(sessions, key=lambda session: session.start_s))


class _Blocks:
    """Numbers of blocks: those that all sessions share, and new ones."""

    def __init__(self, shared_tokens: int) -> None:
        self.shared = tuple(range(shared_tokens // BLOCK_TOKENS))
        self._next = len(self.shared)

    def new(self, tokens: int) -> tuple[int, ...]:
        first, self._next = self._next, self._next + math.ceil(tokens / BLOCK_TOKENS)
        return tuple(range(first, self._next))


def _session(load: AgentLoad, source: random.Random, blocks: _Blocks, number: int) -> Session:
    def tokens(of: Lognormal) -> int:
        return max(1, round(of.draw(source) * load.scale))

    most = load.max_prompt * load.scale
    own = tokens(load.own)
    context = len(blocks.shared) * BLOCK_TOKENS + own
    turns = [Turn(0.0, context, blocks.shared + blocks.new(own), tokens(load.output))]
    while True:
        calls_tools = source.random() < load.tool_share
        delay = load.tool_delay if calls_tools else load.human_delay
        delay_s = delay.draw(source) * max(0.2, 1.0 - 0.8 * context / most)
        new = tokens(load.new)
        context += turns[-1].output_tokens + new
        if context >= most or source.random() < load.reset * (1 + (load.reset_scaling - 1) * context / most):
            return Session(f"agent-{number}", source.uniform(0.0, load.spread_s), tuple(turns))
        turns[-1] = replace(turns[-1], calls_tools=calls_tools)
        turns.append(Turn(delay_s, new, blocks.new(new), tokens(load.output)))


def mean_context(sessions: Iterable[Session]) -> float:
    """Return the mean length of a session's context when an answer ends, in tokens, over all answers."""
    total = count = 0
    for session in sessions:
        context = 0
        for turn in session.turns:
            context += turn.new_tokens + turn.output_tokens
            total, count = total + context, count + 1
    return total / count
