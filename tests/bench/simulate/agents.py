"""Agents beside a chat, in virtual time: how long their jobs take under one policy or another."""

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.simulate.agent_traces import Session
from bench.simulate.policies import JobPolicy
from bench.simulate.results import percentile
from bench.simulate.simulation import ShardKind
from caravan_scheduler.actions import Action, Deliver, Fail, Preempt, Start
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.events import Event, Submitted, ToolsCalled
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.replay.played_shard import OUTPUT_TOKEN_ID, PlayedShard
from caravan_studio.replay.virtual_fleet import Fleet, Member
from caravan_testing.requests import request

AGENTS = Tenant(name="agents")
CHAT = Tenant(name="chat")
# A return after a longer delay need not start at once.
_SOON_S = 10.0
_AT_ONCE_S = 0.2
# The router lets its scheduler notice the time so often.
_TICK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """What agents and chat saw. Times are in seconds.

    ``job_s``: the mean time from the first request of a session to its last answer, delays included. ``at_once``: of
    the requests that came within 10 s of the answer before, the share that started within 0.2 s. ``computed``: the
    share of the sessions' prompt tokens that was not cached. ``longest_wait_s``: the longest of a session's request.
    """

    policy: str
    sessions: int
    job_s: float
    job_p99_s: float
    all_s: float
    at_once: float
    return_ttft_p50_s: float
    computed: float
    longest_wait_s: float
    chat_ttft_p50_s: float
    chat_ttft_p99_s: float
    chats: int
    preemptions: int
    cpu_us: float


@dataclass(slots=True)
class _Asked:
    at_s: float
    job: "_Job | None"
    # Whether it came soon after the answer before.
    is_soon: bool
    started_s: float | None = None
    first_s: float | None = None


@dataclass(slots=True)
class _Job:
    session: Session
    context: tuple[int, ...] = ()
    asked: int = 0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSetting:
    """The fleet, and the chat beside the agents: a request every ``chat_every_s`` seconds on average."""

    shards: tuple[ShardKind, ...]
    chat_every_s: float = 4.0
    seed: int = 1
    config: SchedulerConfig = field(default_factory=SchedulerConfig)


class _Clients:
    """The agents and the chat. ``due``: when the next requests come, of which job; None for the chat."""

    def __init__(self, sessions: Sequence[Session], setting: AgentSetting) -> None:
        self.jobs = [_Job(session) for session in sessions]
        self.asked: dict[int, _Asked] = {}
        self.prompt_tokens = self.cached_tokens = self.preemptions = 0
        self.open_jobs = len(self.jobs)
        # What the router has seen in answers since it last told the scheduler.
        self.tools_called: list[Event] = []
        self._numbers = itertools.count()
        self._chat = random.Random(setting.seed)
        self._chat_every_s = setting.chat_every_s
        self._due: list[tuple[float, int, _Job | None]] = []
        for job in self.jobs:
            self._expect(job.session.start_s, job)
        if setting.chat_every_s:
            self._expect(self._chat.expovariate(1 / setting.chat_every_s), None)

    def _expect(self, at_s: float, job: _Job | None) -> None:
        heapq.heappush(self._due, (at_s, next(self._numbers), job))

    @property
    def next_s(self) -> float:
        return self._due[0][0]

    def ask(self) -> Submitted:
        """Return the request that comes next."""
        at_s, _, job = heapq.heappop(self._due)
        request_id = len(self.asked) + 1
        if job is None:
            self._expect(at_s + self._chat.expovariate(1 / self._chat_every_s), None)
            self.asked[request_id] = _Asked(at_s, None, is_soon=False)
            prompt = tuple(self._chat.choices(range(2_000, 50_000), k=self._chat.randint(200, 800)))
            output = self._chat.randint(50, 150)
            return Submitted(request(request_id, prompt, output, ignore_eos=True, tenant=CHAT, arrived_s=at_s))
        turn = job.session.turns[job.asked]
        self.asked[request_id] = _Asked(at_s, job, is_soon=job.asked > 0 and turn.delay_s <= _SOON_S)
        job.asked += 1
        job.context += turn.words()
        return Submitted(
            request(
                request_id,
                job.context,
                turn.output_tokens,
                ignore_eos=True,
                tenant=AGENTS,
                session=job.session.name,
                arrived_s=at_s,
            )
        )

    def hear(self, now_s: float, action: Action) -> None:
        """Note what the scheduler says of a request."""
        match action:
            case Start():
                asked = self.asked[action.request_id]
                asked.started_s = now_s
                if asked.job is not None:
                    self.prompt_tokens += action.prompt_tokens
                    self.cached_tokens += action.cached_tokens
            case Deliver():
                asked = self.asked[action.request_id]
                if asked.first_s is None:
                    asked.first_s = now_s
                if action.tokens[-1].finish is not None and asked.job is not None:
                    self._end(asked.job, action.request_id, now_s)
            case Preempt():
                self.preemptions += 1
            case Fail():
                raise AssertionError(f"no request can fail here: {action}")
            case _:
                pass

    def _end(self, job: _Job, request_id: int, now_s: float) -> None:
        turns = job.session.turns
        job.context += (OUTPUT_TOKEN_ID,) * turns[job.asked - 1].output_tokens
        if turns[job.asked - 1].calls_tools:
            self.tools_called.append(ToolsCalled(request_id))
        if job.asked < len(turns):
            self._expect(now_s + turns[job.asked].delay_s, job)
            return
        job.ended_s, job.context = now_s, ()
        self.open_jobs -= 1

    def waits_of_agents(self) -> Iterator[float]:
        """Yield how long each request of a session waited until it started."""
        for asked in self.asked.values():
            if asked.job is not None and asked.started_s is not None:
                yield asked.started_s - asked.at_s


def simulate_agents(sessions: Sequence[Session], setting: AgentSetting, policy: JobPolicy) -> AgentReport:
    """Play all ``sessions`` to their ends."""
    members = [
        Member(PlayedShard(f"shard-{number:03}", kind.times), kind.limits, 0)
        for number, kind in enumerate(setting.shards)
    ]
    clients = _Clients(sessions, setting)
    fleet = Fleet([Scheduler(setting.config, new_policy=policy.new)], members, clients.hear)
    fleet.begin()
    ticked_s = 0.0
    while clients.open_jobs:
        step_s, tick_s = fleet.next_s, ticked_s + _TICK_S
        if clients.next_s <= min(step_s, tick_s):
            fleet.run_until(clients.next_s)
            fleet.handle([clients.ask()])
        elif step_s <= tick_s:
            fleet.step()
            if clients.tools_called:
                called, clients.tools_called = clients.tools_called, []
                fleet.handle(called)
        else:
            fleet.run_until(tick_s)
            fleet.tick()
            ticked_s = tick_s
    return _report(clients, fleet, policy)


def _report(clients: _Clients, fleet: Fleet, policy: JobPolicy) -> AgentReport:
    jobs_s = sorted(job.ended_s - job.session.start_s for job in clients.jobs)
    soon = [one for one in clients.asked.values() if one.is_soon and one.started_s is not None]
    at_once = sum(one.started_s - one.at_s <= _AT_ONCE_S for one in soon if one.started_s is not None)
    returns = sorted(one.first_s - one.at_s for one in soon if one.first_s is not None)
    chats = sorted((one.first_s or fleet.now_s) - one.at_s for one in clients.asked.values() if one.job is None)
    return AgentReport(
        policy=policy.value,
        sessions=len(jobs_s),
        job_s=sum(jobs_s) / len(jobs_s),
        job_p99_s=percentile(jobs_s, 0.99),
        all_s=fleet.now_s,
        at_once=at_once / max(1, len(soon)),
        return_ttft_p50_s=percentile(returns, 0.5),
        computed=1 - clients.cached_tokens / max(1, clients.prompt_tokens),
        longest_wait_s=max(clients.waits_of_agents(), default=0.0),
        chat_ttft_p50_s=percentile(chats, 0.5),
        chat_ttft_p99_s=percentile(chats, 0.99),
        chats=len(chats),
        preemptions=clients.preemptions,
        cpu_us=1e6 * fleet.cpu_s / max(1, fleet.steps),
    )
