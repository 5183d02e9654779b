"""The timeline of one model, and pictures of what its scheduler knows."""

import itertools
from collections.abc import Iterable
from typing import Protocol

from caravan_scheduler.actions import Action
from caravan_scheduler.core.generation import shown_session
from caravan_scheduler.events import Event
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.resident import Resident, Status
from caravan_scheduler.shard.saved_runs import KeptRun, Tier
from caravan_studio.timeline.figures import RecentFigures
from caravan_studio.timeline.lanes import Lanes
from caravan_studio.timeline.messages import Cells, Frame, Run, Running, RunningStatus, ShardPicture, State, Waiting

_MOST_MAPPED = 256
_MOST_RUNS = 128
_MOST_WAITING = 100
_WORDS: dict[Status, RunningStatus] = {
    Status.STARTING: "starting",
    Status.LOADED: "loaded",
    Status.LEAVING: "leaving",
}
# Seconds between two messages of a kind.
FRAME_S = 0.25
STATE_S = 1.0


def shard_pictures(scheduler: Scheduler) -> list[ShardPicture]:
    """Describe each shard."""
    return [_picture(shard) for shard in scheduler.shards.values()]


def _picture(shard: ShardAccount) -> ShardPicture:
    residents = (*shard.stays.residents.values(), *shard.stays.leaving.values())
    cells = _shared_map(shard, residents) if shard.layout.shares_cells else _own_map(shard, residents)
    used, runs = shard.runs.used_bytes, shard.runs
    return ShardPicture(
        shard=shard.name,
        draining=shard.drain.has_begun,
        layout="unified" if shard.layout.shares_cells else "split",
        sequences=len(shard.stays.residents),
        max_sequences=shard.capacity.limits.max_sequences,
        cells=shard.capacity.cells,
        used=shard.cells.live,
        cached=shard.cells.held - shard.cells.live,
        step_s=round(shard.costs.mean_step_s, 6),
        memory=(used[Tier.MEMORY], runs.capacity_bytes[Tier.MEMORY]),
        disk=(used[Tier.DISK], runs.capacity_bytes[Tier.DISK]),
        running=[_running(one) for one in residents if one.is_live],
        map=cells[:_MOST_MAPPED],
        more_cells=sum(one.cells for one in cells[_MOST_MAPPED:]),
        runs=_runs(shard),
        more_runs=max(0, len(_listed(shard)) - _MOST_RUNS),
    )


def _running(resident: Resident) -> Running:
    return Running(
        resident.request_id,
        _WORDS.get(resident.status) or ("prefill" if resident.computed < resident.target else "decode"),
        resident.computed,
        resident.target,
        len(resident.sequence.output),
        resident.cached,
    )


def _shared_map(shard: ShardAccount, running: tuple[Resident, ...]) -> list[Cells]:
    """Return the runs of the tree, and behind them what each running sequence has that the tree does not know yet."""
    tails = {one.sequence_id: shard.cells.tail(one) for one in running}
    names = {one.sequence_id: one.request_id for one in running}
    kept = {key: one.request_id for key, one in shard.stays.parked.items()}
    found: list[Cells] = []
    behind: list[tuple[int, int]] = []
    for at, run in enumerate(shard.cells.tree.runs()):
        ends = [key for key in run.ends if key in names]
        behind += [(at, key) for key in ends if tails[key]]
        here = [names[key] for key in ends if not tails[key]]
        found.append(Cells(run.parent, run.cells, here, [kept[key] for key in run.ends if key in kept]))
    found += [Cells(at, tails[key], [names[key]], []) for at, key in behind]
    return found


def _own_map(shard: ShardAccount, running: tuple[Resident, ...]) -> list[Cells]:
    """Return the cells of each sequence, where each has its own."""
    kept = shard.stays.parked.values()
    return [
        *(Cells(-1, one.computed, [one.request_id], []) for one in running),
        *(Cells(-1, one.computed, [], [one.request_id]) for one in kept),
    ]


def _listed(shard: ShardAccount) -> list[KeptRun]:
    return [run for runs in shard.runs.listed.values() for run in runs]


def _runs(shard: ShardAccount) -> list[Run]:
    """Return the runs that were used most recently. A run counts as used before those that begin behind it."""
    recent = _listed(shard)[: -_MOST_RUNS - 1 : -1]
    pinned = shard.runs.pinned
    # Where a run ends, or can be cut, the next one may begin.
    places = {cut: at for at, run in enumerate(recent) for _, cut in run.cuts}
    return [
        Run(run.start, run.end, run.size_bytes, run.tier.value, places.get(run.note.before, -1), run.key in pinned)
        for run in recent
    ]


class Naming(Protocol):
    """What API keys and sessions are called."""

    def tenant(self, name: str) -> str: ...

    def session(self, session: str) -> str: ...


class _OwnNames:
    def tenant(self, name: str) -> str:
        return name

    def session(self, session: str) -> str:
        return shown_session(session)


_OWN_NAMES = _OwnNames()


def waiting_pictures(scheduler: Scheduler, now: float, names: Naming) -> list[Waiting]:
    """Describe the first requests of the queue, in its order; those that wait for one shard come last."""
    return [
        Waiting(
            request=sequence.request_id,
            reason=why.reason.value,
            arrived=round(sequence.request.arrived_s, 6),
            tokens=sequence.known_tokens,
            priority=sequence.spec.priority,
            key=names.tenant(sequence.spec.tenant.name),
            session=names.session(sequence.spec.session),
            of=why.request_id,
            shard=why.shard,
            saved_on=sequence.saved_on,
            started=sequence.started,
        )
        for sequence, why in itertools.islice(scheduler.reasons_to_wait(now), _MOST_WAITING)
    ]


class ModelTimeline:
    """Follows a scheduler that `note` is told of, from ``now`` on."""

    def __init__(self, model: str, scheduler: Scheduler, now: float, names: Naming = _OWN_NAMES) -> None:
        self._model = model
        self._names = names
        self._scheduler = scheduler
        self._figures = RecentFigures(now)
        self._lanes = Lanes(scheduler, self._figures, now)
        self._next_frame_s = now + FRAME_S
        self._next_state_s = now

    def note(self, events: Iterable[Event], actions: list[Action], now: float) -> None:
        """Note what happened, and what the scheduler decided then."""
        self._lanes.note(events, actions, now)

    def hear(self, events: list[Event]) -> None:
        """Do nothing: what happened is told with what was decided."""

    def messages(self, now: float) -> list[Frame | State]:
        """Return what is due: a frame if anything happened, and the state."""
        found: list[Frame | State] = []
        if now >= self._next_frame_s:
            self._next_frame_s = now + FRAME_S
            blocks, marks = self._lanes.take(now)
            if blocks or marks:
                found.append(Frame(model=self._model, at=round(now, 6), blocks=blocks, marks=marks))
        if now >= self._next_state_s:
            self._next_state_s = now + STATE_S
            found.append(self._state(now))
        return found

    def _state(self, now: float) -> State:
        return State(
            model=self._model,
            at=round(now, 6),
            shards=shard_pictures(self._scheduler),
            queue=waiting_pictures(self._scheduler, now, self._names),
            queued=len(self._scheduler.waiting),
            figures=self._figures.figures(now),
        )
