"""The jobs of each key: which request continues which, and how long it took to come."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from caravan_scheduler.config import Clock
from caravan_scheduler.gaps import Gaps
from caravan_scheduler.job import Job, JobKey
from caravan_scheduler.waiting.fair_share import OUTPUT_TOKEN, PROMPT_TOKEN

if TYPE_CHECKING:
    from caravan_scheduler.sequence import Sequence
    from caravan_scheduler.shard.resident import Resident

_MOST_KEYS = 256
# An answer is read by the time that so many others have ended.
_MOST_ANSWERED = 64


class Jobs:
    """All jobs. A request without a session continues the job of the parked sequence that it begins with."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By tenant, the one that was seen last at the end.
        self._keys: OrderedDict[str, JobKey] = OrderedDict()
        # The jobs of the requests that were answered last, by their ids.
        self._answered: OrderedDict[int, Job] = OrderedDict()

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
            self._answered[sequence.request_id] = job
            if len(self._answered) > _MOST_ANSWERED:
                self._answered.popitem(last=False)

    def call_tools(self, request_id: int) -> None:
        """Note that the answer to a request calls tools, so that the next one has their results."""
        job = self._answered.pop(request_id, None)
        if job is not None and not job.requests and not job.calls_tools:
            job.key.note_away(job, 0, -1.0)
            job.calls_tools = True
            job.key.note_away(job, 0)

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

    def _key(self, sequence: "Sequence") -> JobKey:
        name = sequence.spec.tenant.name
        if (key := self._keys.get(name)) is None:
            key = self._keys[name] = JobKey()
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
