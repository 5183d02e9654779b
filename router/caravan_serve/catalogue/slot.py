"""What the catalogue knows of one model."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from caravan_scheduler.core.catalogue import CatalogueModel, Download, ModelState
from caravan_scheduler.residency import ModelNeed, Phase
from caravan_serve.catalogue.entries import CatalogueEntry
from caravan_serve.catalogue.files import FilesHere
from caravan_serve.catalogue.host import RunningModel

# A load takes so long until one was seen.
_GUESSED_LOAD_S = 5.0
# How much the last load counts in what is learnt.
_NEWEST = 0.5

_STATES = {
    Phase.COLD: ModelState.UNLOADED,
    Phase.LOADING: ModelState.LOADING,
    Phase.LOADED: ModelState.LOADED,
    Phase.UNLOADING: ModelState.UNLOADING,
}


@dataclass(slots=True)
class Wishes:
    """Who wants a model, in seconds on ``time.monotonic``.

    ``wanted_since_s``: None unless somebody waits for it to be loaded. ``awaited``: how many wait for that alone.
    ``keep_s``: what a request said, instead of the catalogue.
    """

    wanted_since_s: float | None = None
    is_busy: bool = False
    awaited: int = 0
    is_asked_to_load: bool = False
    is_asked_to_leave: bool = False
    used_s: float = 0.0
    keep_s: float | None = None


@dataclass(slots=True)
class Trouble:
    """Why a model could not be loaded: ``problem`` for operators, ``told`` for clients if it is for them, too.

    ``until_s``: when it is tried again, on ``time.monotonic``. ``times``: failures in a row.
    """

    problem: str = ""
    told: str = ""
    until_s: float = 0.0
    times: int = 0


@dataclass(slots=True, eq=False)
class Slot:
    """A model of the catalogue, in memory or not. Times are in seconds on ``time.monotonic``.

    ``file``, ``bytes_at``: what is loaded, and what it takes; None until they were found. ``files``: None until they
    were looked at. ``work``: what is done with the model just now.
    """

    entry: CatalogueEntry
    phase: Phase = Phase.COLD
    since_s: float = 0.0
    file: Path | None = None
    bytes_at: Mapping[str, int] | None = None
    files: FilesHere | None = None
    load_s: float = _GUESSED_LOAD_S
    was_loaded: bool = False
    wishes: Wishes = field(default_factory=Wishes)
    trouble: Trouble = field(default_factory=Trouble)
    running: RunningModel | None = None
    work: asyncio.Task[None] | None = field(default=None, repr=False)

    def enter(self, phase: Phase, now: float) -> None:
        """Begin another phase."""
        self.phase, self.since_s = phase, now

    def note_load(self, seconds: float) -> None:
        """Learn how long a load takes."""
        self.load_s = seconds if not self.was_loaded else (1 - _NEWEST) * self.load_s + _NEWEST * seconds
        self.was_loaded = True

    @property
    def idle_s(self) -> float:
        """Seconds without requests after which the model is unloaded."""
        return self.entry.idle_s if self.wishes.keep_s is None else self.wishes.keep_s

    @property
    def need(self) -> ModelNeed:
        """The model as the plan sees it. It is not wanted before it is known what it takes."""
        is_wanted = self.bytes_at is not None
        return ModelNeed(
            name=self.entry.name,
            phase=self.phase,
            since_s=self.since_s,
            bytes_at=self.bytes_at or {},
            load_s=self.load_s,
            wanted_since_s=self.wishes.wanted_since_s if is_wanted else None,
            is_busy=self.wishes.is_busy,
            used_s=self.wishes.used_s,
            keep_s=self.idle_s,
            is_pinned=self.entry.pinned,
        )

    def describe(self, now: float, download: Download | None) -> CatalogueModel:
        """Return the model as clients see it. ``download``: how far that of its files is, if there is one."""
        state = _STATES[self.phase]
        if self.phase is Phase.COLD and download is not None:
            state = ModelState.DOWNLOADING
        elif self.phase is Phase.COLD and self.trouble.problem:
            state = ModelState.FAILED
        expires = None
        if self.phase is Phase.LOADED and not self.entry.pinned and self.idle_s < math.inf:
            expires = (
                self.idle_s
                if self.wishes.is_busy
                else max(0.0, self.idle_s - (now - max(self.wishes.used_s, self.since_s)))
            )
        return CatalogueModel(
            name=self.entry.name,
            aliases=self.entry.aliases,
            source=self.entry.source,
            state=state,
            pinned=self.entry.pinned,
            size_bytes=0 if self.files is None else self.files.size,
            modified_s=0.0 if self.files is None else self.files.modified_s,
            fingerprint="" if self.files is None else self.files.sha256 or self.files.fingerprint,
            problem=self.trouble.problem,
            expires_in_s=expires,
            download=download,
        )
