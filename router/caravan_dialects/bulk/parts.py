"""The contents of files in a database that several servers share, and this server's copies of them in a folder."""

from collections.abc import Callable
from pathlib import Path

from caravan_dialects.sql.connection import Connection

_PART_BYTES = 1 << 20


class Parts:
    """The contents of all files. All calls block and come from one thread."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder

    def write(self, file_id: str, path: Path) -> None:
        """Write the content of a file, which is at ``path``. Call it in a transaction."""
        with path.open("rb") as content:
            parts = enumerate(iter(lambda: content.read(_PART_BYTES), b""))
            rows = ((file_id, number, part) for number, part in parts)
            self._connection.executemany("INSERT INTO parts VALUES (?, ?, ?) ON CONFLICT DO NOTHING", rows)

    def copy_to(self, write: Callable[[bytes], object], file_id: str) -> bool:
        """Give the content of a file to ``write``, in parts; return False if it was deleted."""
        with self._connection.snapshot():
            if self._connection.execute("SELECT 1 FROM files WHERE id = ?", (file_id,)).fetchone() is None:
                return False
            query, number = "SELECT content FROM parts WHERE file = ? AND number = ?", 0
            while part := self._connection.execute(query, (file_id, number)).fetchone():
                write(part[0])
                number += 1
        return True

    def delete(self, file_id: str) -> None:
        """Remove the content of a file."""
        self._connection.execute("DELETE FROM parts WHERE file = ?", (file_id,))

    def forget_copies(self, but: str) -> None:
        """Remove the copies of files that were deleted. ``but``: names of other files in the folder begin with it."""
        kept = {name for (name,) in self._connection.execute("SELECT id FROM files")}
        for path in self._folder.iterdir():
            if path.name not in kept and not path.name.startswith(but):
                path.unlink(missing_ok=True)
