"""The files that clients have uploaded and batches have written: rows of a table, with their contents in a folder.

In a database that several servers share, the contents are rows as well, and the folder has copies.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from caravan_dialects.bulk.parts import Parts
from caravan_dialects.bulk.records import StoredFile
from caravan_dialects.conversations.nodes import new_id
from caravan_dialects.sql.connection import SQL_ERRORS, Connection

# How the names of uploads on their way begin.
INCOMING = "incoming"


class Upload:
    """A file on its way, see `caravan_dialects.bulk.store.BulkStore.uploading`. All methods block."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._kept = False
        self.size = 0

    def write(self, data: bytes) -> None:
        """Add bytes. Raises OSError."""
        self._file.write(data)
        self.size += len(data)

    def finish(self) -> Path:
        """Have all bytes on the disk, and return the file that has them. Raises OSError."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._path

    def keep_as(self, path: Path) -> None:
        """Have all bytes on the disk, as the file ``path``. Raises OSError."""
        self.finish().rename(path)
        self._path = path
        self._kept = True

    def take_back(self) -> None:
        """Do not keep the file, if it was kept."""
        self._kept = False
        self.close()

    def close(self) -> None:
        """Remove what has come, unless it was kept."""
        self._file.close()
        if not self._kept:
            self._path.unlink(missing_ok=True)


class FileTable:
    """All files. Calls block and come from one thread."""

    def __init__(self, connection: Connection, folder: Path, parts: Parts | None) -> None:
        self._connection = connection
        self._folder = folder
        self._parts = parts

    def begin_upload(self) -> Upload:
        """Return a new file to write to."""
        path = self._folder / new_id(INCOMING)
        return Upload(path, path.open("wb"))

    def room(self, owner: str, limit: int) -> int:
        """Return how many bytes more ``owner`` may have, if all may have ``limit``."""
        query = (
            "SELECT owner, CAST(sum(bytes) AS BIGINT) FROM (SELECT owner, size AS bytes FROM files UNION ALL "
            "SELECT owner, length(answer) FROM lines JOIN batches ON id = batch WHERE answer IS NOT NULL) AS used "
            "GROUP BY owner"
        )
        used: dict[str, int] = dict(self._connection.execute(query))
        # It may have as much as it leaves free.
        return max(0, (limit - sum(used.values()) - used.get(owner, 0)) // 2)

    def find(self, owner: str, file_id: str) -> StoredFile | None:
        """Return a file; None if the owner has none of this id."""
        row = self._connection.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        return None if row is None else file_of_row(row)

    def add(self, upload: Upload, file: StoredFile, limit: int) -> StoredFile | int:
        """Make an upload a file, and return that, or the file of this id that is there already.

        If it does not fit, also because of what other servers have added, return the `room`.
        """
        with self.keeping(upload):
            if (known := self.find(file.owner, file.id)) is not None:
                return known
            room = self.room(file.owner, limit)
            if file.size > room:
                return room
            self.write(upload, file)
        return file

    def write_again(self, upload: Upload, file: StoredFile) -> None:
        """Make an upload a file, which may be there already with the same content. It is not asked whether it fits."""
        with self.keeping(upload):
            self.write(upload, file)

    @contextmanager
    def keeping(self, upload: Upload) -> Iterator[None]:
        """Let the block keep ``upload`` in a transaction. If that is not written, the upload is not kept."""
        upload.finish()
        try:
            with self._connection.transaction():
                yield
        except SQL_ERRORS:
            upload.take_back()
            raise

    def write(self, upload: Upload, file: StoredFile) -> None:
        """Make an upload a file, in a block of `keeping`. It is not asked whether it fits."""
        self._connection.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE "
            "SET size = excluded.size, created = excluded.created, expires = excluded.expires",
            (file.id, file.owner, file.purpose, file.name, file.size, file.created, file.expires),
        )
        if self._parts is not None:
            self._parts.write(file.id, upload.finish())
        upload.keep_as(self._folder / file.id)

    def path_of(self, file_id: str) -> Path:
        """Return where the content of a file is, which may have to be copied there first."""
        path = self._folder / file_id
        if self._parts is not None and not path.exists():
            upload = self.begin_upload()
            try:
                if self._parts.copy_to(upload.write, file_id):
                    upload.keep_as(path)
            finally:
                upload.close()
        return path

    def delete(self, owner: str, file_id: str) -> bool:
        """Remove a file; return whether there was one."""
        with self._connection.transaction():
            deleted = self._connection.execute(
                "DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner)
            ).rowcount
            if deleted and self._parts is not None:
                self._parts.delete(file_id)
        if deleted:
            (self._folder / file_id).unlink(missing_ok=True)
        return deleted > 0


def file_of_row(row: Sequence[Any]) -> StoredFile:
    """Return the file of a row with all columns."""
    file_id, owner, purpose, name, size, created, expires = row
    return StoredFile(id=file_id, owner=owner, purpose=purpose, name=name, size=size, created=created, expires=expires)
