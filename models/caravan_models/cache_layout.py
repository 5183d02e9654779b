"""Where huggingface_hub's cache keeps a repository, so that all programs with one cache find each other's files.

    CACHE/models--OWNER--NAME/blobs/ETAG              a file, named by its content
                              blobs/ETAG.incomplete   the beginning of one
                              snapshots/COMMIT/PATH   a link to it
                              refs/REVISION           the commit of a branch or tag
    CACHE/.locks/models--OWNER--NAME/ETAG.lock        held by whoever downloads it

huggingface_hub itself would put the files there without a check of their SHA-256, and begins again from nothing after a
process has died.
"""

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from caravan_models.errors import needs_packages
from caravan_models.listing import RepositoryFile

_PREFIX = "models--"
# Of digits, as Git prints them.
_SHORTEST_COMMIT = 7


def cache_folder() -> Path:
    """Return the folder of its cache, by HF_HUB_CACHE or HF_HOME. Raises FetchError if it is not installed."""
    try:
        from huggingface_hub import constants
    except ModuleNotFoundError as error:
        raise needs_packages(error) from error
    return Path(os.path.expanduser(constants.HF_HUB_CACHE))


def digests_folder() -> Path | None:
    """Return the folder in which digests of files are remembered; None if this user has no place for it."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home
        return None
    return cache / "caravan" / "digests"


@dataclass(frozen=True, slots=True)
class RepositoryCache:
    """The folder of one repository in the cache."""

    cache: Path
    repository: str

    @property
    def folder(self) -> Path:
        """The folder, which may not exist."""
        return self.cache / self._name

    @property
    def _name(self) -> str:
        return _PREFIX + self.repository.replace("/", "--")

    def blob(self, etag: str) -> Path:
        """Return the path of a whole file."""
        return self.folder / "blobs" / etag

    def partial(self, etag: str) -> Path:
        """Return the path of a file that is not whole or not checked."""
        return self.folder / "blobs" / f"{etag}.incomplete"

    def lock(self, etag: str) -> Path:
        """Return the path of a file's lock."""
        return self.cache / ".locks" / self._name / f"{etag}.lock"

    def snapshot(self, commit: str, path: str = "") -> Path:
        """Return the path of a file of a commit, or of the folder of all its files."""
        return self.folder / "snapshots" / commit / path

    def commit_of(self, revision: str) -> str | None:
        """Return the commit that a branch or tag had when it was last asked for, or the one that begins so."""
        try:
            return (self.folder / "refs" / revision).read_text().strip()
        except OSError:
            begun = [commit for commit in self.commits() if commit.startswith(revision)]
            return begun[0] if len(begun) == 1 and len(revision) >= _SHORTEST_COMMIT else None

    def note_commit(self, revision: str, commit: str) -> None:
        """Remember the commit of a branch or tag. Raises OSError."""
        if revision == commit:
            return
        ref = self.folder / "refs" / revision
        if not ref.is_file() or ref.read_text() != commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            beside = ref.with_name(f"{ref.name}.{os.getpid()}.new")
            beside.write_text(commit)
            beside.rename(ref)

    def has(self, commit: str, file: RepositoryFile) -> bool:
        """Whether a whole file is in a commit's folder."""
        try:
            return self.snapshot(commit, file.path).stat().st_size == file.size
        except OSError:
            return False

    def link(self, commit: str, file: RepositoryFile) -> None:
        """Put a whole file into a commit's folder. Raises OSError."""
        pointer, blob = self.snapshot(commit, file.path), self.blob(file.etag)
        if self.has(commit, file):
            return
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.unlink(missing_ok=True)
        try:
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        except FileExistsError:
            pass  # another process was quicker
        except OSError:
            # A file system without links. What is at the path is read all the same.
            beside = pointer.with_name(f"{pointer.name}.{os.getpid()}.new")
            shutil.copyfile(blob, beside)
            beside.rename(pointer)

    def commits(self) -> list[str]:
        """Return the commits of which there may be files."""
        return _names(self.folder / "snapshots")

    def refs(self) -> dict[str, str]:
        """Return the commit of each branch or tag that was asked for."""
        folder = self.folder / "refs"
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_text().strip() for path in paths}

    def partials(self) -> list[Path]:
        """Return the files that are not whole."""
        return sorted((self.folder / "blobs").glob("*.incomplete"))

    def is_being_downloaded(self, partial: Path) -> bool:
        """Whether a process has the lock of a file that is not whole."""
        try:
            descriptor = os.open(self.lock(partial.name.partition(".")[0]), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def remove_unused(self) -> int:
        """Remove whole files to which no commit has a link, and all of the repository if nothing else is left.

        Return the bytes that were removed. Raises OSError.
        """
        links = [path for path in (self.folder / "snapshots").rglob("*") if path.is_symlink()]
        used = {path.resolve().name for path in links}
        freed = 0
        for name in _names(self.folder / "blobs"):
            blob = self.blob(name)
            if name not in used and blob not in self.partials():
                freed += blob.stat().st_size
                blob.unlink()
        if not any(path.is_file() for path in (self.folder / "snapshots").rglob("*")) and not self.partials():
            shutil.rmtree(self.folder)
        return freed

    def files(self, commit: str) -> list[RepositoryFile]:
        """Return the whole files of a commit's folder."""
        folder = self.snapshot(commit)
        found = []
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                etag = path.resolve().name if path.is_symlink() else ""
                found.append(RepositoryFile(path.relative_to(folder).as_posix(), path.stat().st_size, etag))
        return found


def repositories(cache: Path) -> list[RepositoryCache]:
    """Return the repositories of models that the cache has something of."""
    names = [name.removeprefix(_PREFIX) for name in _names(cache) if name.startswith(_PREFIX)]
    return [RepositoryCache(cache, name.replace("--", "/", 1)) for name in names]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
