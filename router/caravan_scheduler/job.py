"""A job, and what is known of all jobs of its key."""

import heapq
import itertools
from dataclasses import dataclass
from typing import Protocol

from caravan_scheduler.gaps import EDGES_S, REQUEST_GUESS, SESSION_GUESS, Gaps

# An answer is known to call no tools if nobody has said so after this time.
_READ_S = 0.25
_NEWEST_GROWTH = 0.5
# Clients choose the names of sessions, so there is no end of them: no more of a key are remembered while they are away.
_MOST_AWAY = 1024


class ParkedSequence(Protocol):
    """What a request of a job continues: see `shard.resident.Resident`."""

    sequence_id: int
    computed: int
    is_awaited: bool
    is_continued: bool

    @property
    def is_parked(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Job:
    """Requests that continue each other: a session, or what requests without one begin with.

    ``gaps``: how soon the next request came, ``gaps_of_tools``: the same after answers that called tools. ``requests``:
    how many wait or run. ``ended_s``: when the last answer ended, in seconds on the scheduler's clock. ``length``:
    tokens of the sequence that ended last. ``growth``: by how many tokens a request and its answer are longer than
    those before, on average; 0 before that is known. ``service``: tokens that were computed for it. ``calls_tools``:
    whether the answer that ended last did.
    """

    gaps: Gaps
    gaps_of_tools: Gaps
    session: str
    key: "JobKey"
    requests: int = 0
    ended_s: float = 0.0
    length: int = 0
    growth: float = 0.0
    service: float = 0.0
    calls_tools: bool = False

    @property
    def gap(self) -> Gaps:
        """The gaps of which the present one is."""
        return self.gaps_of_tools if self.calls_tools else self.gaps

    @property
    def may_return(self) -> bool:
        """Whether its next request is expected at all."""
        return self.gaps.may_return or self.gaps_of_tools.may_return

    def return_rate(self, away_s: float) -> float:
        """Return how soon the next request is expected: see `Gaps.return_rate`."""
        rate = self.gap.return_rate(away_s)
        if self.calls_tools or away_s > _READ_S:
            return rate
        # Nobody has said yet whether the answer calls tools.
        return max(rate, self.gaps_of_tools.return_rate(away_s))

    @property
    def expected_growth(self) -> float:
        """By how many tokens its next request and answer are going to be longer: as those of its key, at first."""
        return self.growth or self.key.growth

    def end(self, length: int, now_s: float) -> None:
        """Note that an answer has ended."""
        if self.length and length > self.length:
            self.growth = _followed(self.growth, length - self.length)
            self.key.growth = _followed(self.key.growth, length - self.length)
        self.length, self.ended_s, self.calls_tools = length, now_s, False


def _followed(mean: float, newest: float) -> float:
    return mean + _NEWEST_GROWTH * (newest - mean) if mean else newest


# By whether they have a session, and whether they called tools.
_GUESSES = {
    (False, False): REQUEST_GUESS,
    (False, True): REQUEST_GUESS,
    (True, False): SESSION_GUESS,
    (True, True): SESSION_GUESS,
}


class JobKey:
    """What is known of a key: ``gaps`` of its jobs, by whether they have a session and whether they called tools."""

    def __init__(self) -> None:
        self.gaps = {kind: Gaps(guess) for kind, guess in _GUESSES.items()}
        self.sessions: dict[str, Job] = {}
        # By how many tokens a request and its answer are longer than those before, on average; 0 before any is known.
        self.growth = 0.0
        # When each job that is away reaches which bin; a number keeps the order; and when its answer ended.
        self._due: list[tuple[float, int, int, Job, float]] = []
        self._numbers = itertools.count()

    def begin_gap(self, job: Job, place: int = 0) -> None:
        """Note that ``job`` is away as the bin at ``place`` begins. If too many are, it is forgotten."""
        self.note_away(job, place)
        if len(self._due) >= _MOST_AWAY:
            self.sessions.pop(job.session, None)
            return
        due_s = job.ended_s + EDGES_S[place]
        heapq.heappush(self._due, (due_s, place, next(self._numbers), job, job.ended_s))

    def note_away(self, job: Job, place: int, times: float = 1.0) -> None:
        """Count ``job`` as away as the bin at ``place`` begins."""
        self.gaps[bool(job.session), job.calls_tools].note_away(place, times)
        job.gap.note_away(place, times)

    def pass_time(self, now_s: float) -> None:
        """Note which jobs are still away. Those that do not come back are forgotten."""
        while self._due and self._due[0][0] <= now_s:
            _, place, _, job, ended_s = heapq.heappop(self._due)
            if job.requests or job.ended_s != ended_s:
                continue
            if place + 1 < len(EDGES_S):
                self.begin_gap(job, place + 1)
            elif job.session:
                self.sessions.pop(job.session, None)
