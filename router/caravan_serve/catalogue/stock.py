"""What operators add to the catalogue and remove from it: models of the hub's cache, and models made of others.

Servers that share a cache share the file of the names that operators gave models: each change reads what is there, and
puts a whole new file into its place.
"""

import asyncio
import contextlib
import fcntl
import math
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from caravan_dialects.api.ollama.recipe import recipe_of
from caravan_models.cache_layout import cache_folder
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.fetching import fetch
from caravan_models.local_store import remove, stored_models
from caravan_models.progress import FetchStage, Progress
from caravan_models.reference import HUB_PREFIX, HubModel, KnownModel, hub_model, known_model, known_models, parse_hub
from caravan_scheduler.core.catalogue import CatalogueError, CatalogueFaultError, Download, MadeModel, PullProgress
from caravan_scheduler.residency import Phase
from caravan_serve.catalogue.entries import CatalogueEntry, CatalogueFileError, check_name
from caravan_serve.catalogue.shelf import Shelf
from caravan_serve.catalogue.slot import Trouble

_NAME = "caravan-models.json"
# Problems of this host, the network or the hub, whatever was asked for.
_FAULTS = frozenset(
    {
        FetchProblem.NO_NETWORK,
        FetchProblem.CUT_OFF,
        FetchProblem.HUB_FAILS,
        FetchProblem.TOO_MANY_REQUESTS,
        FetchProblem.NO_HUB,
        FetchProblem.BUSY,
        FetchProblem.DISK_FULL,
        FetchProblem.CACHE_UNUSABLE,
        FetchProblem.NEEDS_PACKAGES,
        FetchProblem.BROKEN,
    }
)
_POLL_S = 0.05


class _Made(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    base: str
    recipe: dict[str, object]
    made_s: float


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: list[_Made]


class MadeFile:
    """Keeps models that were made of others. All calls block."""

    def __init__(self, folder: Path) -> None:
        """``folder``: that of the hub's cache, which may not exist yet."""
        self._path = folder / _NAME

    def read(self) -> dict[str, MadeModel]:
        """Return the models by name. Raises CatalogueFileError, which names the file and the problem."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_File).models
            for made in found:
                check_name("name", made.name)
                recipe_of(made.recipe)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CatalogueFileError(f"{self._path}: {error.strerror}") from error
        except (msgspec.DecodeError, CatalogueFileError) as error:
            raise CatalogueFileError(f"{self._path}: {error}") from error
        return {one.name: MadeModel(one.name, one.base, one.recipe, one.made_s) for one in found}

    def put(self, made: MadeModel) -> dict[str, MadeModel]:
        """Add a model, in place of one with its name; return all. Raises CatalogueError."""
        with self._changing() as models:
            models[made.name] = made
        return models

    def remove(self, name: str) -> dict[str, MadeModel]:
        """Remove a model, if it is there; return all others. Raises CatalogueError."""
        with self._changing() as models:
            models.pop(name, None)
        return models

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, MadeModel]]:
        """Yield the models, and write them as the block leaves them. Others that want to change them wait."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                models = self.read()
                yield models
                self._write(models)
        except (OSError, CatalogueFileError) as error:
            raise CatalogueFaultError(f"the file {_NAME} beside the models cannot be changed") from error

    def _write(self, models: Mapping[str, MadeModel]) -> None:
        file = _File(
            models=[
                _Made(name=made.name, base=made.base, recipe=dict(made.recipe), made_s=made.made_s)
                for made in models.values()
            ]
        )
        beside = self._path.with_suffix(f".{os.getpid()}.new")
        with beside.open("wb") as target:
            target.write(msgspec.json.format(msgspec.json.encode(file), indent=2))
            target.flush()
            os.fsync(target.fileno())
        beside.rename(self._path)


def stored_entries() -> tuple[CatalogueEntry, ...]:
    """Return the models of the hub's cache that can be asked for by name. Blocks. Raises CatalogueFileError."""
    try:
        stored = stored_models(cache_folder())
    except OSError as error:
        raise CatalogueFileError(f"{cache_folder()}: {error.strerror}") from error
    entries = []
    for model in stored:
        try:
            check_name("", model.name)
        except CatalogueFileError:
            continue  # It is of another branch, or its file has a name that is none for a model.
        entries.append(_entry(model.name))
    return tuple(entries)


def _entry(name: str) -> CatalogueEntry:
    aliases = tuple(known.name for known in known_models().values() if known.source.name == name)
    return CatalogueEntry(name=name, source=f"{HUB_PREFIX}{name}", aliases=aliases, is_pulled=True)


def reference_of(name: str) -> HubModel | KnownModel:
    """Return what an operator may pull under ``name``, which becomes no path and no URL but that of the hub.

    Raises CatalogueError.
    """
    if (known := known_model(name)) is not None:
        return known
    try:
        return parse_hub(name.removeprefix(HUB_PREFIX))
    except FetchError as error:
        raise CatalogueError(str(error)) from error


async def pulled(reference: HubModel | KnownModel) -> AsyncGenerator[PullProgress | CatalogueEntry, None]:
    """Download a model; yield how far that is, and at last its entry. Raises CatalogueError."""
    told: asyncio.Queue[Progress | None] = asyncio.Queue()
    fetching = asyncio.create_task(fetch(reference, told.put_nowait))
    fetching.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (progress := await told.get()) is not None:
            yield PullProgress(
                digest=progress.etag,
                done=progress.file_done,
                size=progress.file_size,
                model=Download(progress.done, progress.size),
                is_checking=progress.stage is FetchStage.CHECKING,
            )
        fetched = await fetching
    except FetchError as error:
        raise _failure(error) from error
    finally:
        fetching.cancel()
        await asyncio.wait({fetching})
    if not fetched.model.is_relative_to(cache_folder()):
        # It is the demo model, which no later start would find under the name of the hub's model.
        raise CatalogueFaultError(f"{reference.name} cannot be pulled: the hub does not answer")
    yield await asyncio.to_thread(_newest_entry, hub_model(reference))


def _newest_entry(reference: HubModel) -> CatalogueEntry:
    """Return the entry of a model that was just pulled. A name without a quantisation is that of the only one."""
    entries = [entry for entry in stored_entries() if entry.name.startswith(f"{reference.repository}:")]
    exact = [entry for entry in entries if entry.name == reference.name]
    return (exact or entries or [_entry(reference.name)])[0]


async def removed(entry: CatalogueEntry) -> None:
    """Remove the files of a model of the cache. Raises CatalogueError."""
    reference = parse_hub(entry.source.removeprefix(HUB_PREFIX))
    try:
        await asyncio.to_thread(remove, reference, cache_folder())
    except (FetchError, OSError) as error:
        raise _failure(error) from error


def _failure(error: FetchError | OSError) -> CatalogueError:
    """Return what an operator hears of a problem with the hub or the cache."""
    ours = isinstance(error, OSError) or error.problem in _FAULTS
    return CatalogueFaultError(str(error)) if ours else CatalogueError(str(error))


class ModelStock:
    """Downloads and deletes models of the hub's cache, and makes models of others."""

    def __init__(self, shelf: Shelf, made_file: MadeFile | None) -> None:
        """``made_file``: None if nothing may be changed."""
        self._shelf = shelf
        self._made_file = made_file

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """See `Stock`."""
        self._changeable()
        reference = reference_of(name)
        with self._shelf.downloads.of(hub_model(reference).name) as note:
            async with contextlib.aclosing(pulled(reference)) as steps:
                async for step in steps:
                    if isinstance(step, PullProgress):
                        note(step.model)
                        yield step
                    else:
                        self._shelf.add(step)

    async def make(self, made: MadeModel) -> AsyncGenerator[PullProgress, None]:
        """See `Stock`."""
        made_file = self._changeable()
        try:
            check_name("the name", made.name)
        except CatalogueFileError as error:
            raise CatalogueError(str(error)) from None
        if made.name in self._shelf.own_names:
            raise CatalogueError(f"{made.name} is the name of a model that was not made of another one")
        if self._shelf.find(made.base) is None:
            if known_model(made.base) is None:
                raise CatalogueError(f"there is no model {made.base!r}: pull it first")
            async with contextlib.aclosing(self.pull(made.base)) as steps:
                async for step in steps:
                    yield step
        base = self._shelf.slot(made.base).entry.name
        self._shelf.set_made(await asyncio.to_thread(made_file.put, replace(made, base=base)))

    async def remove(self, name: str) -> None:
        """See `Stock`."""
        made_file = self._changeable()
        if name in self._shelf.made:
            self._shelf.set_made(await asyncio.to_thread(made_file.remove, name))
            return
        slot = self._shelf.slot(name)
        if names := self._shelf.made_of(slot):
            raise CatalogueError(f"{', '.join(names)} was made of {slot.entry.name}: delete that first")
        if not slot.entry.is_pulled:
            raise CatalogueError(f"{name} is of --models-dir or --models-file, which this leaves alone")
        # Nobody waits for it any more, so that it is not loaded again.
        gone = f"The model {slot.entry.name} was deleted"
        slot.trouble = Trouble(problem="it is being deleted", told=gone, until_s=math.inf)
        self._shelf.note_absence(slot)
        while slot.phase is not Phase.COLD or slot.work is not None:
            slot.wishes.is_asked_to_leave = True
            await asyncio.sleep(_POLL_S)
        self._shelf.take(slot)
        try:
            await removed(slot.entry)
        except CatalogueError:
            slot.trouble = Trouble()
            self._shelf.put(slot)
            raise
        await self._shelf.until_forgotten(slot.entry.name, _POLL_S)

    def _changeable(self) -> MadeFile:
        if self._made_file is None:
            raise CatalogueError("this server's models stay as they are: it was started without --models-hub")
        return self._made_file
