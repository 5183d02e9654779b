"""What is in the files of a model: SHA-256 of all bytes, which are read once.

A digest is remembered by what the file system says of the file: while that stays, so do the bytes. Processes of one
user share what they remember, so that only the first of them reads a file. A fingerprint tells files apart at once.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from caravan_models.cache_layout import digests_folder
from caravan_models.cached_model import digest_of_parts

_HEADER_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16
_BLOCK_BYTES = 1 << 20


def fingerprint(parts: Sequence[Path]) -> str:
    """Return the SHA-256 of each part's size, its first MiB and 16 of its blocks: equal for copies of the same files.

    Files of other weights may have an equal one. Raises OSError.
    """
    digest = hashlib.sha256()
    for part in parts:
        size = part.stat().st_size
        digest.update(str(size).encode())
        with part.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
            for block in range(1, _SAMPLES + 1):
                file.seek(max(0, size * block // _SAMPLES - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


class ChangedFileError(Exception):
    """A file is not the one that was seen before."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What a file system says of a file. Equal ones of one host have equal bytes.

    The time of the last change of the inode is there for programs that restore the time of the last modification.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @staticmethod
    def of(status: os.stat_result) -> "FileIdentity":
        """Return what ``status`` says."""
        return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class SeenFile:
    """A file as it was when it was seen."""

    path: Path
    identity: FileIdentity

    @staticmethod
    def at(path: Path) -> "SeenFile":
        """Return the file at ``path`` as it is now. Raises OSError."""
        return SeenFile(path, FileIdentity.of(path.stat()))

    @property
    def is_there(self) -> bool:
        """Whether it is there as it was. A program that opened it since it was seen has these bytes then."""
        try:
            return SeenFile.at(self.path) == self
        except OSError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """SHA-256 of files, hexadecimal. That of a ``model`` in parts: see `FetchedModel.digest`.

    ``projector``: "" without one.
    """

    model: str
    adapters: tuple[str, ...] = ()
    projector: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFiles:
    """The files that decide what a model computes, as they were before it was loaded."""

    model: tuple[SeenFile, ...]
    adapters: tuple[SeenFile, ...] = ()
    projector: SeenFile | None = None

    @property
    def all(self) -> tuple[SeenFile, ...]:
        """Every file."""
        return (*self.model, *self.adapters, *(() if self.projector is None else (self.projector,)))

    def known(self) -> Contents | None:
        """Return what is remembered of the files, at once; None if one of them must be read, or is not what it was."""
        known = KnownDigests(digests_folder())
        found = [known.find(file.identity) if file.is_there else "" for file in self.all]
        return None if "" in found else self._contents(found)

    def read(self, is_wanted: Callable[[], bool] = lambda: True) -> Contents | None:
        """Read those files that are not remembered; None once that is not ``is_wanted`` any more.

        Raises OSError, and ChangedFileError if one is not what it was.
        """
        known = KnownDigests(digests_folder())
        found = []
        for file in self.all:
            digest = _digest(file, known, is_wanted)
            if digest is None:
                return None
            found.append(digest)
        return self._contents(found)

    def _contents(self, digests: list[str]) -> Contents:
        behind_model = len(self.model)
        behind_adapters = behind_model + len(self.adapters)
        return Contents(
            model=digest_of_parts(digests[:behind_model]),
            adapters=tuple(digests[behind_model:behind_adapters]),
            projector="".join(digests[behind_adapters:]),
        )


class KnownDigests:
    """The digests that processes remember in a folder, a small file for each; nothing without a folder.

    What cannot be read or written is not remembered: it is computed again.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, identity: FileIdentity) -> str:
        """Return the digest of a file; "" if it is not known."""
        if self._folder is None:
            return ""
        try:
            match json.loads(self._path(self._folder, identity).read_bytes()):
                case {"identity": written, "sha256": str() as digest} if written == asdict(identity):
                    return digest
        except (OSError, ValueError):
            pass
        return ""

    def note(self, identity: FileIdentity, digest: str) -> None:
        """Remember the digest of a file, and forget that of the file that had its inode before."""
        if self._folder is None:
            return
        path = self._path(self._folder, identity)
        new = path.with_suffix(f".{os.getpid()}.new")
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                new.write_text(json.dumps({"identity": asdict(identity), "sha256": digest}))
                new.replace(path)
            finally:
                new.unlink(missing_ok=True)

    @contextlib.contextmanager
    def turn(self, identity: FileIdentity) -> Iterator[None]:
        """Wait while another process reads the file."""
        with contextlib.ExitStack() as held:
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    self._folder.mkdir(parents=True, exist_ok=True)
                    lock = self._path(self._folder, identity).with_suffix(".lock").open("wb")
                    held.enter_context(lock)
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @staticmethod
    def _path(folder: Path, identity: FileIdentity) -> Path:
        return folder / f"{identity.device:x}-{identity.inode:x}.json"


def note_digest(path: Path, digest: str) -> None:
    """Remember the SHA-256 of a file that was just checked."""
    with contextlib.suppress(OSError):
        KnownDigests(digests_folder()).note(SeenFile.at(path).identity, digest)


def _digest(file: SeenFile, known: KnownDigests, is_wanted: Callable[[], bool]) -> str | None:
    if file.is_there and (found := known.find(file.identity)):
        return found
    with known.turn(file.identity):
        # Another process may have read it meanwhile.
        digest = (known.find(file.identity) if file.is_there else "") or _read(file, is_wanted)
    if digest:
        known.note(file.identity, digest)
    return digest


def _read(file: SeenFile, is_wanted: Callable[[], bool]) -> str | None:
    digest = hashlib.sha256()
    block = bytearray(_BLOCK_BYTES)
    with file.path.open("rb", buffering=0) as opened:
        _check(file, opened.fileno())
        while count := opened.readinto(block):
            if not is_wanted():
                return None
            digest.update(memoryview(block)[:count])
        _check(file, opened.fileno())
    return digest.hexdigest()


def _check(file: SeenFile, descriptor: int) -> None:
    """Raise ChangedFileError if the open file is another one than that which was seen, or was written since."""
    if FileIdentity.of(os.fstat(descriptor)) != file.identity:
        raise ChangedFileError(f"{file.path} has changed since it was loaded")
