"""The models that there are, by name, their downloads, and who is told of them."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from caravan_models.reference import DEFAULT_QUANTISATION, HUB_PREFIX
from caravan_router.engine.absence import Absence
from caravan_router.engine.fleet import Fleet
from caravan_scheduler.core.catalogue import (
    CatalogueError,
    CatalogueModel,
    Download,
    MadeModel,
    ModelState,
    StateChange,
)
from caravan_scheduler.core.engine import ModelNames
from caravan_scheduler.residency import Phase
from caravan_serve.catalogue.entries import CatalogueEntry, names_of
from caravan_serve.catalogue.slot import Slot


class Downloads:
    """Downloads by the name of their model. Several of one model share their files, and are told of as one."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        """``on_change``: called with the name of a model of which more has come, or whose download has ended."""
        self._on_change = on_change
        self._under_way: dict[object, tuple[str, Download]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[Callable[[Download], None]]:
        """Yield what notes how far the download of a model is; it is under way from the first note on."""
        key = object()

        def note(download: Download) -> None:
            self._under_way[key] = name, download
            self._on_change(name)

        try:
            yield note
        finally:
            if self._under_way.pop(key, None) is not None:
                self._on_change(name)

    def find(self, name: str) -> Download | None:
        """Return how far the download of a model is; None if there is none."""
        found = [download for other, download in self._under_way.values() if other == name]
        return max(found, key=lambda download: download.done, default=None)

    @property
    def names(self) -> Sequence[str]:
        """The models that are being downloaded, in the order in which that began."""
        return list(dict.fromkeys(name for name, _ in self._under_way.values()))


_WAITING = Absence(math.inf)


class Shelf:
    """The models of the catalogue. The fleet knows their names, and what holds while one of them is not loaded."""

    def __init__(
        self, entries: Iterable[CatalogueEntry], fleet: Fleet, stored: Mapping[str, MadeModel], *, autoload: bool
    ) -> None:
        """``stored``: those that were made of others. ``autoload``: whether a request may have a model loaded; else
        only operators.
        """
        self._slots = {entry.name: Slot(entry) for entry in entries}
        self._stored = stored
        self._fleet = fleet
        self._autoload = autoload
        self.downloads = Downloads(self._downloaded)
        self._watchers: set[asyncio.Queue[StateChange]] = set()
        # Set when whoever waits for a model should look again, and then replaced.
        self._changed = asyncio.Event()
        self._tell_names()

    @property
    def slots(self) -> Sequence[Slot]:
        """All models, the default first."""
        return list(self._slots.values())

    def find(self, name: str) -> Slot | None:
        """Return a model by its name or by an alias; None if there is none."""
        return self._slots.get(self._fleet.names.meant(name))

    def slot(self, name: str) -> Slot:
        """Return a model by its name or by an alias. Raises CatalogueError."""
        if (slot := self.find(name)) is None:
            raise CatalogueError(f"there is no model {name!r}")
        return slot

    def models(self) -> list[CatalogueModel]:
        """Return all models as clients see them, the default first."""
        return [self.describe(slot) for slot in self._slots.values()]

    def describe(self, slot: Slot) -> CatalogueModel:
        """Return a model as clients see it."""
        model = slot.describe(time.monotonic(), self.downloads.find(slot.entry.name))
        repositories = [alias for alias, name in self._repositories().items() if name == slot.entry.name]
        return replace(model, aliases=(*model.aliases, *repositories, *self.made_of(slot)))

    @property
    def made(self) -> dict[str, MadeModel]:
        """The models that were made of those that there are, by name. A name of the catalogue or the cache prevails."""
        taken = self.own_names
        return {name: made for name, made in self._stored.items() if made.base in self._slots and name not in taken}

    def made_of(self, slot: Slot) -> list[str]:
        """Return the names of the models that were made of one."""
        return [made.name for made in self.made.values() if made.base == slot.entry.name]

    def set_made(self, stored: Mapping[str, MadeModel]) -> None:
        """Change which models were made of others."""
        self._stored = stored
        self._tell_names()

    @property
    def own_names(self) -> set[str]:
        """All names of the models themselves."""
        return {name for slot in self._slots.values() for name in (slot.entry.name, *slot.entry.aliases)}

    def arriving(self) -> list[CatalogueModel]:
        """Return the models that are being downloaded and are not here yet."""
        return [
            CatalogueModel(
                name=name,
                source=f"{HUB_PREFIX}{name}",
                state=ModelState.DOWNLOADING,
                download=self.downloads.find(name),
            )
            for name in self.downloads.names
            if name not in self._slots
        ]

    def add(self, entry: CatalogueEntry) -> None:
        """Add a model, unless its name is there; aliases that are taken are left out."""
        if entry.name not in self._slots:
            taken = self.own_names | self._stored.keys()
            aliases = tuple(alias for alias in entry.aliases if alias not in taken)
            self.put(Slot(replace(entry, aliases=aliases)))

    def put(self, slot: Slot) -> None:
        """Add a model as it is."""
        self._slots[slot.entry.name] = slot
        self._tell_names()
        self.changed(slot)

    def take(self, slot: Slot) -> None:
        """Remove a model. Raises CatalogueError if it is gone already."""
        if self._slots.pop(slot.entry.name, None) is None:
            raise CatalogueError(f"there is no model {slot.entry.name!r}")
        self._tell_names()
        self._tell(StateChange(slot.entry.name, None))

    async def until_forgotten(self, name: str, poll_s: float) -> None:
        """Wait until the fleet does not know a model any more that was taken."""
        while self._fleet.engine(name) is not None:  # noqa: ASYNC110  it forgets the model soon
            await asyncio.sleep(poll_s)

    def changed(self, slot: Slot) -> None:
        """Let everybody know that a model's state has changed."""
        self.note_absence(slot)
        self._tell_state(slot)

    async def until_changed(self) -> None:
        """Wait until the state of any model changes, or what `absence` says of it."""
        await self._changed.wait()

    async def changes(self) -> AsyncGenerator[StateChange, None]:
        """Yield what changes from now on."""
        watcher: asyncio.Queue[StateChange] = asyncio.Queue()
        self._watchers.add(watcher)
        try:
            while True:
                yield await watcher.get()
        finally:
            self._watchers.discard(watcher)

    def note_absence(self, slot: Slot) -> None:
        """Let whoever waits for a model know whether that still makes sense."""
        self._fleet.demand.set_absence(slot.entry.name, self.absence(slot))
        self._changed.set()
        self._changed = asyncio.Event()

    def absence(self, slot: Slot) -> Absence:
        """Return how long requests of a model wait while it is not loaded, and what they fail for."""
        name = slot.entry.name
        if slot.trouble.problem:
            return Absence(0.0, slot.trouble.told or f"The model {name} could not be loaded. Its server's log says why")
        if slot.phase is Phase.COLD and not (self._autoload or slot.wishes.is_asked_to_load):
            return Absence(0.0, f"The model {name} is not loaded, and requests load no models on this server")
        return _WAITING

    def _repositories(self) -> dict[str, str]:
        """Return the repositories of which there is one model, or the usual one, with its name.

        Whoever pulled it may have named no more.
        """
        pulled = [slot.entry.name for slot in self._slots.values() if slot.entry.is_pulled]
        of = {name: name.partition(":")[0] for name in pulled}
        times = Counter(of.values())
        taken = self.own_names | self.made.keys()
        return {
            alias: name
            for name, alias in of.items()
            if alias not in taken and (times[alias] == 1 or name == f"{alias}:{DEFAULT_QUANTISATION}")
        }

    def _tell_names(self) -> None:
        entries = [slot.entry for slot in self._slots.values()]
        self._fleet.names = ModelNames(
            expected=tuple(entry.name for entry in entries),
            aliases=names_of(entries) | self._repositories() | {made.name: made.base for made in self.made.values()},
            strict=True,
            load_on_demand=True,
        )
        for slot in self._slots.values():
            self.note_absence(slot)

    def _downloaded(self, name: str) -> None:
        """Tell how far a download is, or that it has ended."""
        if (slot := self._slots.get(name)) is not None:
            self._tell_state(slot)
        else:
            download = self.downloads.find(name)
            state = None if download is None else ModelState.DOWNLOADING
            self._tell(StateChange(name, state, download=download))

    def _tell_state(self, slot: Slot) -> None:
        model = self.describe(slot)
        self._tell(StateChange(model.name, model.state, model.problem, model.download))

    def _tell(self, change: StateChange) -> None:
        for watcher in self._watchers:
            watcher.put_nowait(change)
