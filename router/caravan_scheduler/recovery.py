"""What follows a bug of the scheduler: the request that has met it fails, and the others go on.

If only that request was touched, it ends where it is. Else, or if its end leaves the state broken, or if nobody knows
which request it was, the scheduler begins anew with all other requests and without shards, which then join again: so
they go on as after the loss of all shards.
"""

from collections.abc import Iterator, Sequence

from caravan_scheduler.actions import Action, Faulted, Flushed
from caravan_scheduler.events import (
    Cancelled,
    Event,
    FlushRequested,
    GraceChanged,
    PinRequested,
    Replaced,
    Submitted,
    Taken,
    ThoughtEndRequested,
    ToolsCalled,
    Unpinned,
)
from caravan_scheduler.fault import FaultError
from caravan_scheduler.invariants import check
from caravan_scheduler.scheduler import Scheduler

# What callers and operators ask for. All other events tell of shards, which are lost when the scheduler begins anew.
_ASKED = (
    Submitted, Cancelled, ThoughtEndRequested, ToolsCalled, Replaced, Taken, PinRequested, Unpinned, FlushRequested,
    GraceChanged,
)  # fmt: skip


def handle(scheduler: Scheduler, events: Sequence[Event], now: float) -> list[Action]:
    """Do what `Scheduler.handle` does, and go on if it raises an exception, which a `Faulted` tells."""
    reading = _Reading(events)
    try:
        return scheduler.handle(reading, now)
    except Exception as error:  # noqa: BLE001  whatever a bug raises
        return _Recovery(scheduler, now).after(error, reading.left)


class _Reading:
    """Events that are applied one after another."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._applied = 0

    def __iter__(self) -> Iterator[Event]:
        for event in self._events:
            yield event
            self._applied += 1

    @property
    def left(self) -> Sequence[Event]:
        """Those that are not applied. The first one was begun."""
        return self._events[self._applied :]


class _Recovery:
    """Collects what is decided meanwhile."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._now = now
        self._actions: list[Action] = []
        self._faults: list[Faulted] = []
        self._failed: set[int] = set()

    def after(self, error: Exception, left: Sequence[Event]) -> list[Action]:
        """Return the actions, where ``error`` was raised and the events ``left`` were not applied."""
        found = self._contain(error, left)
        if found is not None:
            self._begin_anew(*found)
        # Last: all that was decided before is told first.
        return [*self._actions, *self._faults]

    def _contain(self, error: Exception, left: Sequence[Event]) -> tuple[Exception, Sequence[Event]] | None:
        """End the requests that met bugs while no other was touched, and go on; None if that was all.

        Else return the exception that is left, and the events that are not applied.
        """
        scheduler = self._scheduler
        while True:
            failed = self._blamed(error, left)
            is_contained = (isinstance(error, FaultError) and error.is_contained) or (
                bool(left) and isinstance(left[0], Submitted)
            )
            if not is_contained or not self._failed.isdisjoint(failed):
                return error, left
            try:
                scheduler.state.expel(failed)
            except Exception:  # noqa: BLE001  as above
                return error, left
            reading = _Reading([one for one in left if not (isinstance(one, Submitted) and _id_of(one) in failed)])
            self._note(error, failed, is_rebuilt=False)
            try:
                self._actions += scheduler.handle(reading, self._now)
                check(scheduler)
            except Exception as another:  # noqa: BLE001  as above
                error, left = another, reading.left
            else:
                return None

    def _begin_anew(self, error: Exception, left: Sequence[Event]) -> None:
        """Let the scheduler begin anew, and apply what is ``left`` of what was asked for."""
        try:
            self._restart(error, self._blamed(error, left))
            for event in _asked(left):
                if not self._is_over(event):
                    self._apply(event)
            self._actions += self._scheduler.handle((), self._now)
            check(self._scheduler)
        except Exception as another:  # noqa: BLE001  as above
            # Nothing can be kept.
            submitted = {_id_of(event) for event in left if isinstance(event, Submitted)}
            self._restart(another, tuple({*self._scheduler.sequences, *submitted} - self._failed))
            self._actions += self._scheduler.state.outbox.drain()

    def _is_over(self, event: Event) -> bool:
        """Whether the request that ``event`` brings has failed, or has come before."""
        match event:
            case Submitted():
                return _id_of(event) in self._failed
            case Taken(sequences=(sequence,)):
                return sequence.request_id in self._failed or sequence.request_id in self._scheduler.sequences
            case _:
                return False

    def _apply(self, event: Event) -> None:
        """Apply an event to the scheduler that has begun anew, which begins anew again if that raises an exception."""
        reading = _Reading((event,))
        try:
            self._actions += self._scheduler.handle(reading, self._now)
        except Exception as error:
            if not reading.left:
                raise
            self._restart(error, self._blamed(error, (event,)))
            if isinstance(event, FlushRequested):
                self._actions.append(Flushed(event.flush_id, ()))

    def _restart(self, error: Exception, failed: tuple[int, ...]) -> None:
        self._note(error, self._scheduler.begin_anew(failed), is_rebuilt=True)

    def _note(self, error: Exception, failed: tuple[int, ...], *, is_rebuilt: bool) -> None:
        self._failed.update(failed)
        cause = error.error if isinstance(error, FaultError) else error
        self._faults.append(Faulted(cause, failed, is_rebuilt))

    def _blamed(self, error: Exception, left: Sequence[Event]) -> tuple[int, ...]:
        """Return the requests that fail with the one to blame, and itself; none if nobody knows which it is."""
        blamed = set(error.request_ids) if isinstance(error, FaultError) else set[int]()
        if not blamed and left and isinstance(left[0], Submitted):
            blamed = {_id_of(left[0])}
        for request_id in tuple(blamed):
            blamed.update(self._scheduler.state.requests_with(request_id))
        for event in left:
            if isinstance(event, Submitted) and (beams := event.request.spec.beams) is not None:
                first = _id_of(event) - beams.index
                search = range(first, first + beams.width)
                if not blamed.isdisjoint(search):
                    blamed.update(search)
        return tuple(sorted(blamed))


def _id_of(event: Submitted) -> int:
    return event.request.request_id


def _asked(events: Sequence[Event]) -> Iterator[Event]:
    """Yield what was asked for, request by request."""
    for event in events:
        if isinstance(event, Taken):
            yield from (Taken((sequence,)) for sequence in event.sequences)
        elif isinstance(event, _ASKED):
            yield event
