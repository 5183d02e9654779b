"""What the stores ask of a database, and SQLite, which gives it."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from caravan_proto.packages import Part, lack

# A file, the URL of a PostgreSQL database, or None for the memory of this process.
Place = Path | str | None
Values = Sequence[Any] | Mapping[str, Any]
# For each version of the tables, the statements that make it of the one before.
Versions = Sequence[Sequence[str]]

# Another router may write to the file for a moment, when it takes over from this one.
_BUSY_S = 10.0


class PostgresError(Exception):
    """An error of PostgreSQL, or of the way to it. ``is_away``: whether it may pass, as a lost connection does."""

    def __init__(self, message: str, *, is_away: bool) -> None:
        super().__init__(message)
        self.is_away = is_away


class VersionError(Exception):
    """The tables were made by a later version of Caravan."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(f"its version is {found}, not {known}")


# What any method of a connection raises if the database fails.
SQL_ERRORS = (sqlite3.Error, PostgresError)


class Rows(Protocol):
    """The outcome of a statement."""

    @property
    def rowcount(self) -> int:
        """How many rows were changed."""
        ...

    def fetchone(self) -> Any:
        """Return the next row; None after the last one."""
        ...

    def fetchall(self) -> list[Any]:
        """Return the other rows."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """A connection to a database. Outside of `transaction` and `snapshot`, each statement is a transaction.

    All methods block, and all calls come from one thread. They raise one of SQL_ERRORS.
    """

    @property
    def server(self) -> int:
        """The number of this connection among those that share the database. What it works on has this number."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether others work on the database at the same time."""
        ...

    def execute(self, statement: str, values: Values = (), /) -> Rows:
        """Run a statement."""
        ...

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> object:
        """Run a statement for each of ``rows``."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """Write all that the block writes, or nothing if it raises. No other connection writes meanwhile."""
        ...

    def snapshot(self) -> AbstractContextManager[None]:
        """Let all statements of the block, which only read, see the same state."""
        ...

    def rollback(self) -> None:
        """Undo what the block of `transaction` has written so far. It writes nothing afterwards."""
        ...

    def migrate(self, versions: Versions) -> None:
        """Make the tables, or bring them up to date. Raises VersionError."""
        ...

    def claim(self, table: str, condition: str, values: Sequence[object] = ()) -> None:
        """Give the rows of ``condition`` whose server is not connected any more the number of this one.

        ``values``: of its placeholders.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Sqlite(sqlite3.Connection):
    """A file, or a database in memory. Its rows all have the server 0: a `FileLock` says who works on them."""

    server = 0
    is_shared = False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """See `Connection`."""
        with self:
            self.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """See `Connection`."""
        with self:
            self.execute("BEGIN")
            yield

    def migrate(self, versions: Versions) -> None:
        """See `Connection`."""
        with self.transaction():
            ((version,),) = self.execute("PRAGMA user_version")
            for statement in chain.from_iterable(versions[version:]):
                self.execute(statement)
            self.execute(f"PRAGMA user_version = {max(version, len(versions))}")
        if version > len(versions):
            raise VersionError(version, len(versions))

    def claim(self, table: str, condition: str, values: Sequence[object] = ()) -> None:
        """See `Connection`: who has the lock has all rows."""


def sqlite(file: Path | None) -> Sqlite:
    """Open a file that outlives its process, or memory. Raises sqlite3.Error."""
    name = ":memory:" if file is None else file
    connection = sqlite3.connect(name, timeout=_BUSY_S, isolation_level=None, factory=Sqlite)
    connection.execute("PRAGMA journal_mode = WAL")
    # The last transactions may be lost with the power; the file stays whole.
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def connected(place: Place, schema: str) -> Connection:
    """Return a connection to a database. ``schema``: that of its tables in PostgreSQL. Raises one of SQL_ERRORS."""
    if not isinstance(place, str):
        return sqlite(place)
    # An extra, which only those need who have such a database.
    if lacking := lack(Part.POSTGRESQL):
        raise PostgresError(f"PostgreSQL {lacking}", is_away=False)
    from caravan_dialects.sql.postgres import Postgres

    return Postgres(place, schema)
