"""Models that can be loaded and unloaded while the router runs, as the API sees them."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from caravan_proto.messages.model import ModelFile


class ModelState(Enum):
    """Where a model is. The values are those of llama-server's router."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"
    DOWNLOADING = "downloading"


@dataclass(frozen=True, slots=True)
class Download:
    """How far the download of a model is: bytes that are here, of so many of all its files. No count gets smaller."""

    done: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """A model of the catalogue.

    ``source``: the file or the repository that it comes from. ``size_bytes``: of its files, 0 if it is not known.
    ``modified_s``: when its files were last changed, in Unix time; 0 if it is not known. ``fingerprint``: the digest of
    its shards' model, "" if it is not known. ``problem``: why it could not be loaded. ``expires_in_s``: seconds until
    it is unloaded if no request comes; None: it stays until its place is needed. ``download``: of its files, while
    there is one.
    """

    name: str
    aliases: tuple[str, ...] = ()
    source: str
    state: ModelState
    pinned: bool = False
    size_bytes: int = 0
    modified_s: float = 0.0
    fingerprint: str = ""
    problem: str = ""
    expires_in_s: float | None = None
    download: Download | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What the files of a model say, be it loaded or not.

    ``generates`` is false for a model that only embeds texts. ``fills``: it knows tokens for filling in.
    """

    file: ModelFile
    generates: bool
    fills: bool


@dataclass(frozen=True, slots=True)
class StateChange:
    """A model has a new state, more of it was downloaded, or it is no longer there (None)."""

    name: str
    state: ModelState | None
    problem: str = ""
    download: Download | None = None


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far a download is: bytes that are here of the file with this SHA-256, of so many. No count gets smaller.

    ``model``: how far all files of the model are.
    """

    digest: str
    done: int
    size: int
    model: Download
    is_checking: bool = False


@dataclass(frozen=True, slots=True)
class MadeModel:
    """A model that an operator made of another one, whose files and shards it shares.

    ``base``: the name of that. ``recipe``: an object of JSON that says what its requests have besides. ``made_s``: when
    it was made, in Unix time.
    """

    name: str
    base: str
    recipe: Mapping[str, object]
    made_s: float


class CatalogueError(Exception):
    """What was asked of the catalogue cannot be done. The text is one line for the operator who asked."""


class CatalogueFaultError(CatalogueError):
    """It cannot be done now, and not because of what was asked: a disk is full, or the hub does not answer."""


class Stock(Protocol):
    """What operators add to a catalogue and remove from it."""

    def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Download a model of the hub and add it; yield how far that is. Closed early, it can be continued later.

        ``name``: a known name, or OWNER/REPOSITORY:QUANTISATION. Raises CatalogueError.
        """
        ...

    def make(self, made: MadeModel) -> AsyncGenerator[PullProgress, None]:
        """Add a model that was made of another one, or change it. A known name for a base is downloaded if needed.

        Raises CatalogueError.
        """
        ...

    async def remove(self, name: str) -> None:
        """Remove a model that was made, or one of the hub, from the disk too. Raises CatalogueError."""
        ...


class Catalogue(Protocol):
    """The models of a host, of which some are in memory. All names are those of the catalogue, aliases included."""

    @property
    def stock(self) -> Stock:
        """What operators add and remove."""
        ...

    def models(self) -> Sequence[CatalogueModel]:
        """Return all models, the default first."""
        ...

    def arriving(self) -> Sequence[CatalogueModel]:
        """Return the models that are being downloaded and cannot be asked for yet."""
        ...

    def find(self, name: str) -> CatalogueModel | None:
        """Return a model by its name or by an alias; None if there is none."""
        ...

    def made(self, name: str) -> MadeModel | None:
        """Return a model that was made of another one; None if there is none of this name."""
        ...

    def all_made(self) -> Sequence[MadeModel]:
        """Return all models that were made of others."""
        ...

    async def survey(self) -> None:
        """Look at the files of all models, so that `models` tells what is known of them."""
        ...

    async def describe(self, name: str) -> ModelDescription:
        """Return what the files of a model say, without loading it. Raises CatalogueError if they cannot be read."""
        ...

    def load(self, name: str) -> None:
        """Have a model loaded as soon as there is room. Raises CatalogueError if there is no such model."""
        ...

    async def wait_until_loaded(self, name: str) -> None:
        """Wait as a request of the model does until it is loaded. Raises CatalogueError, NoShardError."""
        ...

    def unload(self, name: str) -> None:
        """Have a model unloaded once what runs on it has ended. Raises CatalogueError if there is none."""
        ...

    def keep(self, name: str, seconds: float | None) -> None:
        """Let a model stay for ``seconds`` after its last request, until it is said otherwise; None: as configured.

        Infinity: it stays, unless its place is needed.
        """
        ...

    def changes(self) -> AsyncGenerator[StateChange, None]:
        """Yield what changes from now on, until the caller closes the iterator."""
        ...
