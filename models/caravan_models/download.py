"""Brings a model from a hub into the cache, or finds that it is there. Blocks; `fetching` does not."""

import errno
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
from filelock import Timeout
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock

from caravan_models.cache_layout import RepositoryCache
from caravan_models.cached_model import FetchedModel, demo_model, fetched_model, find_cached
from caravan_models.contents import note_digest
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.hub import Hub, HubSettings, failure_of
from caravan_models.listing import RepositoryFile, choose, size_text
from caravan_models.progress import FetchStage, Meter, OnProgress
from caravan_models.reference import HubModel, Named, hub_model
from caravan_models.transfer import SHA256_LENGTH, Source, bring

_WAIT_S = 0.25
# Failures after which what the cache has is served instead.
_UNREACHABLE = frozenset(
    {FetchProblem.NO_NETWORK, FetchProblem.HUB_FAILS, FetchProblem.NO_HUB, FetchProblem.TOO_MANY_REQUESTS}
)


@dataclass(frozen=True, slots=True)
class BlobDownload:
    """One file on its way into the cache."""

    reference: HubModel
    commit: str
    file: RepositoryFile
    hub: Hub
    cache: RepositoryCache
    meter: Meter

    def run(self) -> None:
        """Return when the file is there. One process downloads it, the others wait.

        Raises FetchError, and what `bring` raises.
        """
        blob, lock = self.cache.blob(self.file.etag), self.cache.lock(self.file.etag)
        blob.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        has_waited = False
        while not self._is_there():
            try:
                with WeakFileLock(lock, timeout=_WAIT_S):
                    # Whoever had the lock may have brought it.
                    if not self._is_there():
                        self._bring(blob)
            except Timeout:
                has_waited = True
                self._tell(FetchStage.WAITING, self._partial_size())
        if has_waited:
            self._tell(FetchStage.WAITING, self.file.size)

    def _is_there(self) -> bool:
        try:
            return self.cache.blob(self.file.etag).stat().st_size == self.file.size
        except OSError:
            return False

    def _partial_size(self) -> int:
        try:
            return self.cache.partial(self.file.etag).stat().st_size
        except OSError:
            return 0

    def _bring(self, blob: Path) -> None:
        file, partial = self.file, self.cache.partial(self.file.etag)
        source = Source(
            url=self.hub.url(self.reference, self.commit, file.path),
            headers=self.hub.headers(),
            size=file.size,
            digest=file.etag,
            label=file.path,
        )
        bring(source, partial, self.hub.settings, self._tell)
        partial.replace(blob)
        if len(file.etag) == SHA256_LENGTH:
            note_digest(blob, file.etag)

    def _tell(self, stage: FetchStage, done: int) -> None:
        self.meter.tell(stage, self.file.path, self.file.etag, done, self.file.size)


def download(named: Named, settings: HubSettings, on_progress: OnProgress) -> FetchedModel:
    """Return the model's files once all of them are here. Raises FetchError."""
    reference = hub_model(named)
    cache = RepositoryCache(settings.cache, reference.repository)
    try:
        return replace(_download(named, cache, settings, on_progress), name=named.name)
    except OSError as error:
        if isinstance(error, HfHubHTTPError):
            raise failure_of(error, reference, settings.endpoint) from error
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise FetchError(
                FetchProblem.DISK_FULL,
                f"the disk of {settings.cache} became full; free some space and start again, what is there is kept",
            ) from error
        raise FetchError(
            FetchProblem.CACHE_UNUSABLE,
            f"cannot use the cache {settings.cache}: {error.strerror or error}; set HF_HUB_CACHE to a folder that can "
            "be written",
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise failure_of(error, reference, settings.endpoint) from error


def _download(named: Named, cache: RepositoryCache, settings: HubSettings, on_progress: OnProgress) -> FetchedModel:
    reference = hub_model(named)
    if settings.offline:
        try:
            return find_cached(reference, cache)
        except FetchError as error:
            return _without_hub(named, settings, FetchError(error.problem, f"HF_HUB_OFFLINE is set, and {error}"))
    hub = Hub(settings)
    try:
        listing = hub.listing(reference)
    except FetchError as error:
        if error.problem not in _UNREACHABLE:
            raise
        try:
            found = find_cached(reference, cache)
        except FetchError:
            return _without_hub(named, settings, error)
        return replace(found, note=f"{error}. Using what the cache has of {reference.name}")
    files = choose(reference, listing.files)
    missing = [file for file in files.all if not cache.has(listing.commit, file)]
    for file in missing:
        if not file.etag:
            raise FetchError(
                FetchProblem.NO_DIGEST,
                f"{settings.endpoint} names no digest of {file.path}, so it could not be checked; use another hub",
            )
    _check_space(cache, missing)
    meter = Meter(sum(file.size for file in files.all), on_progress)
    for file in files.all:
        if file in missing:
            BlobDownload(reference, listing.commit, file, hub, cache, meter).run()
            cache.link(listing.commit, file)
        meter.end_file(file.size)
    # The last step, so that a name never leads to a commit whose files are not here.
    cache.note_commit(reference.revision, listing.commit)
    return fetched_model(reference, cache, listing.commit, files)


def _without_hub(named: Named, settings: HubSettings, error: FetchError) -> FetchedModel:
    """Return the demo model if it is the one that is named; else raise ``error``, which names it."""
    demo = demo_model(named, settings.demo_file)
    if demo is None:
        raise FetchError(
            error.problem, f"{error}. In a checkout, plain `make run` serves a demo model that needs no hub"
        ) from None
    return replace(demo, note=f"{error}. Using the demo model instead: {demo.model}")


def _check_space(cache: RepositoryCache, missing: list[RepositoryFile]) -> None:
    """Raise FetchError if the disk has no room for what is not here yet, before a byte is asked for."""
    needed = 0
    for file in {file.etag: file for file in missing}.values():
        if not cache.blob(file.etag).exists():
            partial = cache.partial(file.etag)
            needed += max(0, file.size - (partial.stat().st_size if partial.exists() else 0))
    folder = cache.folder
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FetchError(
            FetchProblem.DISK_FULL,
            f"{cache.repository} needs {size_text(needed)} more in {cache.cache}, which has {size_text(free)} free; "
            "free some space, remove models with `caravan rm`, or set HF_HUB_CACHE to a folder on another disk",
        )
