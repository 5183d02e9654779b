"""The models of the hub's cache, to which operators add and from which they remove."""

import asyncio
from collections.abc import AsyncGenerator

from caravan_models.cache_folder import cache_folder
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.fetching import fetch
from caravan_models.known import known_model, known_models
from caravan_models.local_store import remove, stored_models
from caravan_models.progress import Phase, Progress
from caravan_models.reference import HUB_PREFIX, HubModel, KnownModel, hub_model, parse_hub
from caravan_scheduler.core.library import Download, LibraryError, LibraryFaultError, PullProgress
from caravan_serve.library.catalogue import CatalogueError, check_name
from caravan_serve.library.entry import CatalogueEntry

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
        FetchProblem.NEEDS_EXTRA,
        FetchProblem.BROKEN,
    }
)


def stored_entries() -> tuple[CatalogueEntry, ...]:
    """Return the models of the hub's cache that can be asked for by name. Blocks. Raises CatalogueError."""
    try:
        stored = stored_models(cache_folder())
    except OSError as error:
        raise CatalogueError(f"{cache_folder()}: {error.strerror}") from error
    entries = []
    for model in stored:
        try:
            check_name("", model.name)
        except CatalogueError:
            continue  # It is of another branch, or its file has a name that is none for a model.
        entries.append(_entry(model.name))
    return tuple(entries)


def _entry(name: str) -> CatalogueEntry:
    aliases = tuple(known.name for known in known_models().values() if known.source.name == name)
    return CatalogueEntry(name=name, source=f"{HUB_PREFIX}{name}", aliases=aliases, is_pulled=True)


def reference_of(name: str) -> HubModel | KnownModel:
    """Return what an operator may pull under ``name``, which becomes no path and no URL but that of the hub.

    Raises LibraryError.
    """
    if (known := known_model(name)) is not None:
        return known
    try:
        return parse_hub(name.removeprefix(HUB_PREFIX))
    except FetchError as error:
        raise LibraryError(str(error)) from error


async def pulled(reference: HubModel | KnownModel) -> AsyncGenerator[PullProgress | CatalogueEntry, None]:
    """Download a model; yield how far that is, and at last its entry. Raises LibraryError."""
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
                is_checking=progress.phase is Phase.CHECKING,
            )
        fetched = await fetching
    except FetchError as error:
        raise _failure(error) from error
    finally:
        fetching.cancel()
        await asyncio.wait({fetching})
    if not fetched.model.is_relative_to(cache_folder()):
        # It is the demo model, which no later start would find under the name of the hub's model.
        raise LibraryFaultError(f"{reference.name} cannot be pulled: the hub does not answer")
    yield await asyncio.to_thread(_newest_entry, hub_model(reference))


def _newest_entry(reference: HubModel) -> CatalogueEntry:
    """Return the entry of a model that was just pulled. A name without a quantisation is that of the only one."""
    entries = [entry for entry in stored_entries() if entry.name.startswith(f"{reference.repository}:")]
    exact = [entry for entry in entries if entry.name == reference.name]
    return (exact or entries or [_entry(reference.name)])[0]


async def removed(entry: CatalogueEntry) -> None:
    """Remove the files of a model of the cache. Raises LibraryError."""
    reference = parse_hub(entry.source.removeprefix(HUB_PREFIX))
    try:
        await asyncio.to_thread(remove, reference, cache_folder())
    except (FetchError, OSError) as error:
        raise _failure(error) from error


def _failure(error: FetchError | OSError) -> LibraryError:
    """Return what an operator hears of a problem with the hub or the cache."""
    ours = isinstance(error, OSError) or error.problem in _FAULTS
    return LibraryFaultError(str(error)) if ours else LibraryError(str(error))
