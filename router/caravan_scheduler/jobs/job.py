"""The jobs of each key: which request continues which, and how long it took to come."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caravan_scheduler.config import Clock
from caravan_scheduler.jobs.gaps import EDGES_S, REQUEST_GUESS, SESSION_GUESS, Gaps
from caravan_scheduler.waiting.fair_share import OUTPUT_TOKEN, PROMPT_TOKEN

if TYPE_CHECKING:
    from caravan_scheduler.sequence import Sequence
    from caravan_scheduler.shard.resident import Resident

_MOST_KEYS = 256
# An answer is known to call no tools if nobody has said so after this time.
_READ_S = 0.25
# An answer is read by the time that so many others have ended.
_MOST_ANSWERED = 64
_NEWEST_GROWTH = 0.5


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
    key: "_Key"
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


class _Key:
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
        """Note that ``job`` is away, until the bin at ``place`` begins."""
        self.note_away(job, place)
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


class Jobs:
    """All jobs. A request without a session continues the job of the parked sequence that it begins with."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By tenant, the one that was seen last at the end.
        self._keys: OrderedDict[str, _Key] = OrderedDict()
        # The requests that were answered last, by id.
        self._answered: OrderedDict[int, Sequence] = OrderedDict()

    def enter(self, sequence: "Sequence", parked: Iterable["Resident"]) -> None:
        """Find the job of ``sequence``, which has come, and which of the ``parked`` sequences it continues."""
        now_s, session = self._clock.now_s, sequence.spec.session
        key = self._key(sequence)
        key.pass_time(now_s)
        source = sequence.continues = _continued(sequence, parked)
        job = key.sessions.get(session) if session else None if source is None else source.sequence.job
        if job is None:
            gaps, gaps_of_tools = (Gaps(key.gaps[bool(session), called]) for called in (False, True))
            job = Job(gaps, gaps_of_tools, session, key)
            if session:
                key.sessions[session] = job
        elif job.length and not job.requests:
            gap_s = now_s - job.ended_s
            key.gaps[bool(session), job.calls_tools].note_back(gap_s)
            job.gap.note_back(gap_s)
        job.requests += 1
        sequence.job = job
        if source is not None:
            source.is_awaited = True

    def start(self, sequence: "Sequence", tokens: float) -> None:
        """Note that ``sequence`` has a place, where ``tokens`` of its prompt are computed for the first time."""
        if sequence.job is not None:
            sequence.job.service += PROMPT_TOKEN * tokens
        if sequence.continues is not None:
            sequence.continues.is_continued = True
            self._await_no_more(sequence)

    def answer(self, sequence: "Sequence") -> None:
        """Note that ``sequence`` has its last token."""
        if (job := sequence.job) is not None:
            job.end(sequence.known_tokens, self._clock.now_s)
            job.service += OUTPUT_TOKEN * len(sequence.output)
            self._answered[sequence.request_id] = sequence
            if len(self._answered) > _MOST_ANSWERED:
                self._answered.popitem(last=False)

    def call_tools(self, request_id: int) -> None:
        """Note that the answer to a request calls tools, so that the next one has their results."""
        sequence = self._answered.pop(request_id, None)
        job = None if sequence is None else sequence.job
        if sequence is not None and job is not None and not job.requests and not job.calls_tools:
            key = self._key(sequence)
            key.note_away(job, 0, -1.0)
            job.calls_tools = True
            key.note_away(job, 0)

    def leave(self, sequence: "Sequence") -> None:
        """Note that ``sequence`` has ended, or waits elsewhere."""
        self._await_no_more(sequence)
        if (job := sequence.job) is None:
            return
        job.requests -= 1
        if job.requests:
            return
        key = self._key(sequence)
        if job.length:
            job.ended_s = self._clock.now_s
            key.begin_gap(job)
        elif job.session:
            key.sessions.pop(job.session, None)

    def _await_no_more(self, sequence: "Sequence") -> None:
        if sequence.continues is not None:
            sequence.continues.is_awaited = False
            sequence.continues = None

    def _key(self, sequence: "Sequence") -> _Key:
        name = sequence.spec.tenant.name
        if (key := self._keys.get(name)) is None:
            key = self._keys[name] = _Key()
            if len(self._keys) > _MOST_KEYS:
                self._keys.popitem(last=False)
        self._keys.move_to_end(name)
        return key


def _continued(sequence: "Sequence", parked: Iterable["Resident"]) -> "Resident | None":
    """Return the longest of ``parked`` whose prompt ``sequence`` begins with, of its own key and session."""
    spec, best = sequence.spec, None
    for resident in parked:
        other = resident.sequence.spec
        if other.session != spec.session or other.tenant.name != spec.tenant.name:
            continue
        if (best is None or resident.computed > best.computed) and sequence.continues_prompt_of(resident.sequence):
            best = resident
    return best
