"""Loads and unloads models as requests ask for them."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from caravan_router.core.library import LibraryError, LibraryModel, PullProgress, StateChange
from caravan_router.core.model_names import ModelNames
from caravan_router.engine.absence import Absence
from caravan_router.engine.fleet import Fleet
from caravan_router.scheduling.residency.model_need import Phase
from caravan_router.scheduling.residency.plan import Load, Refuse, Step, Unload, plan
from caravan_router.serve.library.catalogue import names_of
from caravan_router.serve.library.entry import CatalogueEntry
from caravan_router.serve.library.host import ShardHost
from caravan_router.serve.library.hub import pulled, reference_of, removed
from caravan_router.serve.library.memory import Memory, MemoryProblem
from caravan_router.serve.library.slot import Slot, Trouble
from caravan_router.serve.shard_process import ShardStartError

_log = logging.getLogger(__name__)

# Requests are looked for, and time passes, so often.
_TICK_S = 0.05
# A model that could not be loaded is tried again for a request after so many seconds, longer after each failure.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 5.0, 300.0
# A shard that listens joins within so many seconds, or it never will.
_JOIN_S = 60.0

_WAITING = Absence(math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySettings:
    """``turn_s``: see `plan`. ``autoload``: whether a request may have a model loaded; else only operators.

    ``has_hub``: whether operators may download and delete models of the hub's cache.
    """

    turn_s: float = 30.0
    autoload: bool = True
    has_hub: bool = False


class ModelLibrary:
    """The models of this host. `run` loads and unloads them; everything happens on its event loop."""

    def __init__(
        self,
        entries: Iterable[CatalogueEntry],
        fleet: Fleet,
        host: ShardHost,
        memory: Memory,
        settings: LibrarySettings,
    ) -> None:
        self._slots = {entry.name: Slot(entry) for entry in entries}
        self._fleet = fleet
        self._host = host
        self._memory = memory
        self._settings = settings
        self._poked = asyncio.Event()
        # Set when a model has changed, and then replaced.
        self._changed = asyncio.Event()
        self._watchers: set[asyncio.Queue[StateChange]] = set()
        self._tell_fleet()

    async def run(self) -> None:
        """Serve until cancelled; then end all shards."""
        for slot in self._slots.values():
            slot.wishes.is_asked_to_load = slot.entry.pinned
            self._fleet.demand.set_absence(slot.entry.name, self._absence(slot))
        try:
            while True:
                now = time.monotonic()
                for slot in self._slots.values():
                    self._observe(slot, now)
                needs = [slot.need for slot in self._slots.values()]
                for step in plan(needs, self._memory.room(needs), self._settings.turn_s, now):
                    self._carry_out(step, now)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await self._poked.wait()
                self._poked.clear()
        finally:
            await self._end()

    def _observe(self, slot: Slot, now: float) -> None:
        """Note who wants the model, and prepare what the plan has to know of it."""
        name, wishes, trouble = slot.entry.name, slot.wishes, slot.trouble
        wishes.is_busy = wishes.awaited > 0 or self._fleet.demand.exists(name)
        wishes.used_s = now if wishes.is_busy else max(wishes.used_s, self._fleet.demand.last_used_s(name))
        if trouble.problem and now >= trouble.until_s:
            trouble.problem = ""
            self._fleet.demand.set_absence(name, self._absence(slot))
        is_wanted = wishes.is_asked_to_load or (wishes.is_busy and self._settings.autoload)
        if slot.phase is not Phase.COLD or not is_wanted or trouble.problem:
            wishes.wanted_since_s = None
        elif wishes.wanted_since_s is None:
            wishes.wanted_since_s = now
        if wishes.wanted_since_s is not None and slot.bytes_at is None and slot.work is None:
            slot.work = asyncio.create_task(self._prepare(slot))
        if wishes.is_asked_to_leave and slot.phase is Phase.LOADED:
            self._carry_out(Unload(name), now)
        if slot.phase is not Phase.LOADING:
            wishes.is_asked_to_leave = False

    def _carry_out(self, step: Step, now: float) -> None:
        slot = self._slots[step.name]
        match step:
            case Load():
                slot.wishes.is_asked_to_load = False
                self._enter(slot, Phase.LOADING, now)
                slot.work = asyncio.create_task(self._load(slot))
            case Unload():
                self._enter(slot, Phase.UNLOADING, now)
                slot.work = asyncio.create_task(self._unload(slot))
            case Refuse():
                unit = "models" if step.place == "models" else "MiB"
                needs, most = (
                    (step.needs_bytes, step.most_bytes)
                    if unit == "models"
                    else (-(-step.needs_bytes >> 20), step.most_bytes >> 20)
                )
                where = "" if unit == "models" else f" of memory ({step.place})"
                problem = f"it needs {needs} {unit}{where}, and at most {most} {unit} can be had"
                self._fail(slot, problem, told=f"The model {slot.entry.name} could not be loaded: {problem}")
            case _:
                assert_never(step)

    async def _prepare(self, slot: Slot) -> None:
        """Find the file of a model, and what it takes."""
        try:
            loaded = [one.need for one in self._slots.values() if one.phase is not Phase.COLD]
            prepared = await self._memory.prepare(slot.entry, loaded)
            slot.file, slot.bytes_at = prepared.file, prepared.bytes_at
        except (MemoryProblem, OSError) as problem:
            self._fail(slot, str(problem))
        finally:
            slot.work = None
            self._poked.set()

    async def _load(self, slot: Slot) -> None:
        assert slot.file is not None, slot.entry.name
        began_s = time.monotonic()
        _log.info("loading a model", extra={"model": slot.entry.name, "file": str(slot.file)})
        slot.running = self._host.start(slot.entry, slot.file)
        try:
            await slot.running.until_listening()
            async with asyncio.timeout(_JOIN_S):
                await self._fleet.demand.until_serving(slot.entry.name)
        except (ShardStartError, OSError) as error:  # TimeoutError is an OSError
            await slot.running.stop()
            slot.running = None
            self._enter(slot, Phase.COLD, time.monotonic())
            self._fail(slot, str(error) or "its shard did not join the router")
        else:
            now = time.monotonic()
            slot.note_load(now - began_s)
            slot.trouble = Trouble()
            slot.wishes.used_s = max(slot.wishes.used_s, now)
            self._enter(slot, Phase.LOADED, now)
            _log.info("loaded a model", extra={"model": slot.entry.name, "seconds": round(now - began_s, 3)})
        finally:
            slot.work = None
            self._poked.set()

    async def _unload(self, slot: Slot) -> None:
        assert slot.running is not None, slot.entry.name
        _log.info("unloading a model", extra={"model": slot.entry.name})
        try:
            await slot.running.stop()
            slot.running = None
            self._enter(slot, Phase.COLD, time.monotonic())
        finally:
            slot.work = None
            self._poked.set()

    async def _end(self) -> None:
        working = [slot.work for slot in self._slots.values() if slot.work is not None]
        for work in working:
            work.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await asyncio.gather(*(slot.running.stop() for slot in self._slots.values() if slot.running is not None))

    def _enter(self, slot: Slot, phase: Phase, now: float) -> None:
        slot.enter(phase, now)
        self._fleet.demand.set_absence(slot.entry.name, self._absence(slot))
        self._tell(slot)

    def _fail(self, slot: Slot, problem: str, *, told: str = "") -> None:
        """Tell those who wait for a model why it cannot be loaded, and do not try again for a while."""
        slot.wishes.is_asked_to_load, slot.wishes.wanted_since_s = False, None
        times = slot.trouble.times + 1
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** (times - 1))
        slot.trouble = Trouble(problem=problem, told=told, until_s=time.monotonic() + pause_s, times=times)
        _log.warning(
            "a model cannot be loaded", extra={"model": slot.entry.name, "reason": problem, "pause_s": pause_s}
        )
        self._fleet.demand.set_absence(slot.entry.name, self._absence(slot))
        self._tell(slot)

    def _absence(self, slot: Slot) -> Absence:
        name = slot.entry.name
        if slot.trouble.problem:
            return Absence(0.0, slot.trouble.told or f"The model {name} could not be loaded. Its server's log says why")
        if slot.phase is Phase.COLD and not (self._settings.autoload or slot.wishes.is_asked_to_load):
            return Absence(0.0, f"The model {name} is not loaded, and requests load no models on this server")
        return _WAITING

    def _tell_fleet(self) -> None:
        """Let the router know which names there are."""
        entries = [slot.entry for slot in self._slots.values()]
        self._fleet.names = ModelNames(
            expected=tuple(entry.name for entry in entries),
            aliases=names_of(entries),
            strict=True,
            load_on_demand=True,
        )
        for slot in self._slots.values():
            self._fleet.demand.set_absence(slot.entry.name, self._absence(slot))

    def _tell(self, slot: Slot) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        described = slot.describe(time.monotonic())
        for watcher in self._watchers:
            watcher.put_nowait(StateChange(described.name, described.state, described.problem))

    # What the API asks

    def models(self) -> Sequence[LibraryModel]:
        """See `Library`."""
        now = time.monotonic()
        return [slot.describe(now) for slot in self._slots.values()]

    def find(self, name: str) -> LibraryModel | None:
        """See `Library`."""
        slot = self._slots.get(self._fleet.names.meant(name))
        return None if slot is None else slot.describe(time.monotonic())

    def load(self, name: str) -> None:
        """See `Library`."""
        slot = self._slot(name)
        if slot.phase is Phase.COLD:
            slot.wishes.is_asked_to_load, slot.trouble.problem = True, ""
            self._fleet.demand.set_absence(slot.entry.name, self._absence(slot))
            self._poked.set()

    async def wait_until_loaded(self, name: str) -> None:
        """See `Library`."""
        slot = self._slot(name)
        slot.wishes.awaited += 1
        try:
            while slot.phase is not Phase.LOADED:
                absence = self._absence(slot)
                if absence.grace_s == 0.0:
                    raise absence.error(slot.entry.name)
                self._poked.set()
                await self._changed.wait()
        finally:
            slot.wishes.awaited -= 1

    def unload(self, name: str) -> None:
        """See `Library`."""
        slot = self._slot(name)
        slot.wishes.is_asked_to_load = False
        slot.wishes.is_asked_to_leave = slot.phase in (Phase.LOADED, Phase.LOADING)
        self._poked.set()

    def keep(self, name: str, seconds: float | None) -> None:
        """See `Library`."""
        self._slot(name).wishes.keep_s = seconds

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """See `Library`."""
        self._check_hub()
        async with contextlib.aclosing(pulled(reference_of(name))) as steps:
            async for step in steps:
                if isinstance(step, PullProgress):
                    yield step
                elif step.name not in self._slots:
                    taken = {known for slot in self._slots.values() for known in (slot.entry.name, *slot.entry.aliases)}
                    aliases = tuple(alias for alias in step.aliases if alias not in taken)
                    self._slots[step.name] = slot = Slot(replace(step, aliases=aliases))
                    self._tell_fleet()
                    self._tell(slot)

    async def remove(self, name: str) -> None:
        """See `Library`."""
        self._check_hub()
        slot = self._slot(name)
        if not slot.entry.is_pulled:
            raise LibraryError(f"{name} is of --models-dir or --models-file, which this leaves alone")
        # Nobody waits for it any more, so that it is not loaded again.
        gone = f"The model {slot.entry.name} was deleted"
        slot.trouble = Trouble(problem="it is being deleted", told=gone, until_s=math.inf)
        self._fleet.demand.set_absence(slot.entry.name, self._absence(slot))
        while slot.phase is not Phase.COLD or slot.work is not None:
            slot.wishes.is_asked_to_leave = True
            self._poked.set()
            await asyncio.sleep(_TICK_S)
        if self._slots.pop(slot.entry.name, None) is None:
            raise LibraryError(f"there is no model {name!r}")
        try:
            await removed(slot.entry)
        except LibraryError:
            slot.trouble = Trouble()
            self._slots[slot.entry.name] = slot
            raise
        finally:
            self._tell_fleet()
        for watcher in self._watchers:
            watcher.put_nowait(StateChange(slot.entry.name, None))
        while self._fleet.engine(slot.entry.name) is not None:  # noqa: ASYNC110  it forgets the model soon
            await asyncio.sleep(_TICK_S)

    def _check_hub(self) -> None:
        if not self._settings.has_hub:
            raise LibraryError("this server downloads and deletes no models: it was started without --models-hub")

    async def changes(self) -> AsyncGenerator[StateChange, None]:
        """See `Library`."""
        watcher: asyncio.Queue[StateChange] = asyncio.Queue()
        self._watchers.add(watcher)
        try:
            while True:
                yield await watcher.get()
        finally:
            self._watchers.discard(watcher)

    def _slot(self, name: str) -> Slot:
        slot = self._slots.get(self._fleet.names.meant(name))
        if slot is None:
            raise LibraryError(f"there is no model {name!r}")
        return slot
