"""The workload ``agents``: what some agents send while one person chats. The same seed always gives the same plan.

An agent sends its whole history with every turn, and comes back when its tool has ended. All agents have one system
prompt in common. Some summarise their history on the way, and some wait for an agent of their own that begins with the
same system prompt. Sizes and gaps are those of published traces of coding agents, made smaller so that small models
on a laptop can serve them: a turn adds about a tenth of the prompt.
"""

from dataclasses import dataclass
from random import Random

from caravan_serve.bench.workloads import Shape, seeded, words

_SYSTEM_WORDS = 500
_TASK_WORDS = (40, 120)
_RESULT_WORDS = (40, 220)
_TURNS = (7, 11)
_OUTPUT_TOKENS = (24, 64)
# Tools end within seconds: half of them within one, a few take ten times as long.
_TOOL_MEDIAN_S, _TOOL_SIGMA, _TOOL_MOST_S = 0.8, 0.9, 8.0
# One agent in three has an agent of its own, and one in four summarises its history.
_WITH_SUB_AGENT, _WITH_SUMMARY = 3, 4
_SUB_TURNS = (2, 3)
_SUMMARY_WORDS = 150
_CHAT_WORDS = (8, 24)
_CHAT_TOKENS = (24, 48)
_CHAT_GAP_S = (1.0, 3.0)
# A conversation of this many turns, then the next one.
_CHAT_TURNS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an agent adds to its history, and the number of tokens that it is answered with.

    Before, its tool runs for ``gap_s``, or ``sub_agent`` does, whose last answer comes before ``text``. ``summary``
    takes the place of the history so far, except the system prompt.
    """

    text: str
    tokens: int
    gap_s: float = 0.0
    summary: str | None = None
    sub_agent: "AgentPlan | None" = None


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """A session: the system prompt and the turns after it."""

    system: str
    turns: tuple[Turn, ...]

    @property
    def gaps_s(self) -> float:
        """How long its tools run in all, those of its agents included."""
        return sum(turn.gap_s + (turn.sub_agent.gaps_s if turn.sub_agent else 0.0) for turn in self.turns)


def agent_plans(shape: Shape) -> tuple[AgentPlan, ...]:
    """Return the sessions of ``shape.concurrency`` agents that begin at the same time."""
    rng = seeded(f"agents {shape.concurrency} {shape.seed}")
    system = words(rng, _SYSTEM_WORDS)
    return tuple(_agent(rng, system, number) for number in range(shape.concurrency))


def _agent(rng: Random, system: str, number: int) -> AgentPlan:
    count = rng.randint(*_TURNS)
    middle = count // 2
    turns = [_first_turn(rng), *(_tool_turn(rng) for _ in range(count - 1))]
    if number % _WITH_SUB_AGENT == 0:
        sub = AgentPlan(system, (_first_turn(rng), *(_tool_turn(rng) for _ in range(rng.randint(*_SUB_TURNS)))))
        turns[middle] = Turn(text=turns[middle].text, tokens=turns[middle].tokens, sub_agent=sub)
    if number % _WITH_SUMMARY == _WITH_SUMMARY - 1:
        late = turns[middle + 1]
        turns[middle + 1] = Turn(
            text=late.text, tokens=late.tokens, gap_s=late.gap_s, summary=words(rng, _SUMMARY_WORDS)
        )
    return AgentPlan(system, tuple(turns))


def _first_turn(rng: Random) -> Turn:
    return Turn(text=words(rng, rng.randint(*_TASK_WORDS)), tokens=rng.randint(*_OUTPUT_TOKENS))


def _tool_turn(rng: Random) -> Turn:
    gap_s = min(_TOOL_MOST_S, _TOOL_MEDIAN_S * rng.lognormvariate(0.0, _TOOL_SIGMA))
    return Turn(text=words(rng, rng.randint(*_RESULT_WORDS)), tokens=rng.randint(*_OUTPUT_TOKENS), gap_s=gap_s)


class Chat:
    """The turns of the person who chats, as many as are asked for."""

    def __init__(self, seed: int) -> None:
        self._rng = seeded(f"chat {seed}")
        self._turn = 0

    def next_turn(self) -> Turn:
        """Return the next turn. A summary without words begins a new conversation."""
        is_new = self._turn % _CHAT_TURNS == 0
        self._turn += 1
        return Turn(
            text=words(self._rng, self._rng.randint(*_CHAT_WORDS)),
            tokens=self._rng.randint(*_CHAT_TOKENS),
            gap_s=self._rng.uniform(*_CHAT_GAP_S),
            summary="" if is_new else None,
        )
