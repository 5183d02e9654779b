"""Loads and unloads models as requests ask for them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from caravan_router.engine.fleet import Fleet
from caravan_router.engine.wall import log_bug
from caravan_scheduler.core.catalogue import (
    CatalogueError,
    CatalogueModel,
    Download,
    MadeModel,
    ModelDescription,
    StateChange,
)
from caravan_scheduler.residency import Load, NoPlace, Phase, Refusal, Step, TooLarge, Unload, plan
from caravan_serve.catalogue.entries import CatalogueEntry
from caravan_serve.catalogue.files import FilesHere, described_by, files_of
from caravan_serve.catalogue.host import ShardHost
from caravan_serve.catalogue.memory import Memory, MemoryProblem
from caravan_serve.catalogue.shelf import Shelf
from caravan_serve.catalogue.slot import Slot, Trouble
from caravan_serve.catalogue.stock import MadeFile, ModelStock
from caravan_serve.shard_process import ShardStartError

_log = logging.getLogger(__name__)

# Requests are looked for, and time passes, so often.
_TICK_S = 0.05
# A model that could not be loaded is tried again for a request after so many seconds, longer after each failure.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 5.0, 300.0
# A shard that listens joins within so many seconds, or it never will.
_JOIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueSettings:
    """``turn_s``: see `plan`. ``autoload``: whether a request may have a model loaded; else only operators.

    ``made_file``: of the models that operators make of others, None if they may neither make, download nor delete any;
    ``made``: what it has.
    """

    turn_s: float = 30.0
    autoload: bool = True
    made_file: MadeFile | None = None
    made: Mapping[str, MadeModel] = field(default_factory=dict)


class ModelCatalogue:
    """The models of this host. `run` loads and unloads them; everything happens on its event loop."""

    def __init__(
        self,
        entries: Iterable[CatalogueEntry],
        fleet: Fleet,
        host: ShardHost,
        memory: Memory,
        settings: CatalogueSettings,
    ) -> None:
        self._shelf = Shelf(entries, fleet, settings.made, autoload=settings.autoload)
        self.stock = ModelStock(self._shelf, settings.made_file)
        self._fleet = fleet
        self._host = host
        self._memory = memory
        self._settings = settings
        self._poked = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled; then end all shards."""
        for slot in self._shelf.slots:
            slot.wishes.is_asked_to_load = slot.entry.pinned
            self._shelf.note_absence(slot)
        try:
            while True:
                try:
                    self._look(time.monotonic())
                except Exception:  # noqa: BLE001  whatever a bug raises
                    log_bug("the catalogue has met a bug and goes on")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await self._poked.wait()
                self._poked.clear()
        finally:
            await self._end()

    def _look(self, now: float) -> None:
        """Look at all models, and load and unload what is to be."""
        for slot in self._shelf.slots:
            self._observe(slot, now)
        needs = [slot.need for slot in self._shelf.slots]
        for step in plan(needs, self._memory.room(needs), self._settings.turn_s, now):
            self._carry_out(step, now)

    def _observe(self, slot: Slot, now: float) -> None:
        """Note who wants the model, and prepare what the plan has to know of it."""
        name, wishes, trouble = slot.entry.name, slot.wishes, slot.trouble
        wishes.is_busy = wishes.awaited > 0 or self._fleet.demand.exists(name)
        wishes.used_s = now if wishes.is_busy else max(wishes.used_s, self._fleet.demand.last_used_s(name))
        if trouble.problem and now >= trouble.until_s:
            trouble.problem = ""
            self._shelf.note_absence(slot)
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
        slot = self._shelf.slot(step.name)
        match step:
            case Load():
                slot.wishes.is_asked_to_load = False
                self._enter(slot, Phase.LOADING, now)
                slot.work = asyncio.create_task(self._load(slot))
            case Unload():
                self._enter(slot, Phase.UNLOADING, now)
                slot.work = asyncio.create_task(self._unload(slot))
            case TooLarge() | NoPlace():
                problem = _why(step)
                self._fail(slot, problem, told=f"The model {slot.entry.name} could not be loaded: {problem}")
            case _:
                assert_never(step)

    async def _prepare(self, slot: Slot) -> None:
        """Find the file of a model, and what it takes."""
        try:
            loaded = [one.need for one in self._shelf.slots if one.phase is not Phase.COLD]
            with self._shelf.downloads.of(slot.entry.name) as note:
                prepared = await self._memory.prepare(
                    slot.entry, loaded, lambda told: note(Download(told.done, told.size))
                )
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
        working = [slot.work for slot in self._shelf.slots if slot.work is not None]
        for work in working:
            work.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await asyncio.gather(*(slot.running.stop() for slot in self._shelf.slots if slot.running is not None))

    def _enter(self, slot: Slot, phase: Phase, now: float) -> None:
        slot.enter(phase, now)
        self._shelf.changed(slot)

    def _fail(self, slot: Slot, problem: str, *, told: str = "") -> None:
        """Tell those who wait for a model why it cannot be loaded, and do not try again for a while."""
        slot.wishes.is_asked_to_load, slot.wishes.wanted_since_s = False, None
        times = slot.trouble.times + 1
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** (times - 1))
        slot.trouble = Trouble(problem=problem, told=told, until_s=time.monotonic() + pause_s, times=times)
        _log.warning(
            "a model cannot be loaded", extra={"model": slot.entry.name, "reason": problem, "pause_s": pause_s}
        )
        self._shelf.changed(slot)

    # What the API asks

    def models(self) -> Sequence[CatalogueModel]:
        """See `Catalogue`."""
        return self._shelf.models()

    def arriving(self) -> Sequence[CatalogueModel]:
        """See `Catalogue`."""
        return self._shelf.arriving()

    def made(self, name: str) -> MadeModel | None:
        """See `Catalogue`."""
        return self._shelf.made.get(name)

    def all_made(self) -> Sequence[MadeModel]:
        """See `Catalogue`."""
        return list(self._shelf.made.values())

    def find(self, name: str) -> CatalogueModel | None:
        """See `Catalogue`."""
        slot = self._shelf.find(name)
        return None if slot is None else self._shelf.describe(slot)

    async def survey(self) -> None:
        """See `Catalogue`."""
        slots = self._shelf.slots

        def look() -> list[FilesHere | None]:
            return [_files_if_here(slot) for slot in slots]

        for slot, files in zip(slots, await asyncio.to_thread(look), strict=True):
            slot.files = files

    async def describe(self, name: str) -> ModelDescription:
        """See `Catalogue`."""
        slot = self._shelf.slot(name)
        slot.files = await asyncio.to_thread(files_of, slot.entry, slot.files)
        return await asyncio.to_thread(described_by, slot.entry, slot.files)

    def load(self, name: str) -> None:
        """See `Catalogue`."""
        slot = self._shelf.slot(name)
        if slot.phase is Phase.COLD:
            slot.wishes.is_asked_to_load, slot.trouble.problem = True, ""
            self._shelf.note_absence(slot)
            self._poked.set()

    async def wait_until_loaded(self, name: str) -> None:
        """See `Catalogue`."""
        slot = self._shelf.slot(name)
        slot.wishes.awaited += 1
        try:
            while slot.phase is not Phase.LOADED:
                absence = self._shelf.absence(slot)
                if absence.grace_s == 0.0:
                    raise absence.error(slot.entry.name)
                self._poked.set()
                await self._shelf.until_changed()
        finally:
            slot.wishes.awaited -= 1

    def unload(self, name: str) -> None:
        """See `Catalogue`."""
        slot = self._shelf.slot(name)
        slot.wishes.is_asked_to_load = False
        slot.wishes.is_asked_to_leave = slot.phase in (Phase.LOADED, Phase.LOADING)
        self._poked.set()

    def keep(self, name: str, seconds: float | None) -> None:
        """See `Catalogue`."""
        self._shelf.slot(name).wishes.keep_s = seconds

    def changes(self) -> AsyncGenerator[StateChange, None]:
        """See `Catalogue`."""
        return self._shelf.changes()


def _why(refusal: Refusal) -> str:
    """Return why a model cannot be loaded, for the clients that wait for it too."""
    if isinstance(refusal, NoPlace):
        return f"all {refusal.max_models} places (--models-max) are taken by pinned models"
    needs, most = -(-refusal.needs_bytes >> 20), refusal.most_bytes >> 20
    return f"it needs {needs} MiB of memory ({refusal.place}), of which it could get {most} MiB"


def _files_if_here(slot: Slot) -> FilesHere | None:
    try:
        return files_of(slot.entry, slot.files)
    except CatalogueError:
        return None
