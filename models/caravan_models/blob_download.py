"""Makes one file of a repository a blob of the cache: under its lock, continued, and checked before it has its name."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout
from huggingface_hub.utils import WeakFileLock

from caravan_models.cache_layout import RepositoryCache
from caravan_models.contents import note_digest
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.hub import Hub
from caravan_models.listing import RepositoryFile
from caravan_models.progress import FetchStage, Meter
from caravan_models.reference import HubModel
from caravan_models.transfer import Source, transfer

_WAIT_S = 0.25
_BLOCK = 1 << 22
_SHA256_LENGTH = 64


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

        Raises FetchError, and what `transfer` raises.
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
            label=file.path,
        )
        kept = self._partial_size() > 0
        self._transfer(source, partial)
        found = self._digest(partial)
        if found != file.etag and kept:
            # What was here before may have been damaged, by a power cut or a full disk.
            partial.unlink()
            self._transfer(source, partial)
            found = self._digest(partial)
        if found != file.etag:
            partial.unlink()
            raise FetchError(
                FetchProblem.WRONG_DIGEST,
                f"{file.path} has the digest {found}, but the hub lists {file.etag}: it was damaged on its way, or "
                "changed; it is removed, try again",
            )
        partial.replace(blob)
        if len(found) == _SHA256_LENGTH:
            note_digest(blob, found)

    def _transfer(self, source: Source, partial: Path) -> None:
        transfer(source, partial, self.hub.settings, lambda done: self._tell(FetchStage.DOWNLOADING, done))

    def _tell(self, stage: FetchStage, done: int) -> None:
        self.meter.tell(stage, self.file.path, self.file.etag, done, self.file.size)

    def _digest(self, path: Path) -> str:
        """Return the digest of a file by the rule that its etag follows."""
        self._tell(FetchStage.CHECKING, self.file.size)
        of_git = len(self.file.etag) != _SHA256_LENGTH
        # Git names a file by the SHA-1 of a header and its bytes. Hubs do so with small files.
        digest = hashlib.sha1(usedforsecurity=False) if of_git else hashlib.sha256()
        if of_git:
            digest.update(f"blob {path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest()
