"""PostgreSQL: several servers work on one database, and see which of them are still there.

Each connection holds a lock of its own, which the database releases when it is lost. So a row whose server has no such
lock is nobody's work. All that write take turns, as with SQLite: what a transaction has read stays true to its end.
"""

import math
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from caravan_dialects.sql.connection import PostgresError, Rows, Values, VersionError, Versions

# A network that loses packets must not hold requests for long.
_DEFAULTS = {
    "application_name": "caravan",
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 15_000,
    # Of several hosts, the one that is not a standby.
    "target_session_attrs": "read-write",
}
# Nor must a server that hangs in the middle of a transaction.
_SESSION = """
SET search_path TO {schema};
SET lock_timeout TO '10s';
SET statement_timeout TO '60s';
SET idle_in_transaction_session_timeout TO '10s';
SELECT pg_advisory_lock_shared({servers}, {server})
"""
# The first keys of advisory locks: of servers, and of who writes.
_SERVERS, _WRITERS = 0x43_61_72_61, 0x43_61_72_62
# After a failure to connect, others fail at once for so many seconds.
_RETRY_S = 1.0
# After a restart of the database, other servers come back as late as this. Until then they are not taken for lost.
_RETURN_S = 5.0
_CONNECTED = (
    "SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid = {servers} AND objid = server AND database = "
    "(SELECT oid FROM pg_database WHERE datname = current_database())"
)
_TYPES = {
    # SQLite numbers the rows.
    "INTEGER PRIMARY KEY": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "INTEGER": "BIGINT",
    "BLOB": "BYTEA",
    "REAL": "DOUBLE PRECISION",
}
_TRIGGER = re.compile(r"\s*CREATE TRIGGER (\w+) (AFTER .*?) BEGIN(.*)END\s*", re.DOTALL)


class Postgres:
    """A connection to a database, made again when it is lost. See `caravan_dialects.sql.connection.Connection`."""

    is_shared = True

    def __init__(self, url: str, schema: str) -> None:
        """Raises PostgresError."""
        self.server = secrets.randbelow(1 << 30) + 1
        self._url = url
        self._schema = schema
        self._connection: psycopg.Connection[Any] | None = None
        self._failed_at = -_RETRY_S
        self._may_claim_at = 0.0
        self._begin_to_write = f"BEGIN; SELECT pg_advisory_xact_lock({_WRITERS}, hashtext('{schema}'))"
        with _raising(self):
            self._usable()

    def _usable(self) -> psycopg.Connection[Any]:
        if self._connection is not None:
            return self._connection
        if time.monotonic() < self._failed_at + _RETRY_S:
            raise PostgresError("the database could not be reached a moment ago", is_away=True)
        try:
            settings: dict[str, Any] = _DEFAULTS | conninfo_to_dict(self._url) | {"client_encoding": "utf8"}
            connection = psycopg.connect(**settings, autocommit=True, cursor_factory=psycopg.ClientCursor)
        except psycopg.Error:
            self._failed_at = time.monotonic()
            raise
        try:
            connection.execute(_SESSION.format(schema=self._schema, servers=_SERVERS, server=self.server))
        except psycopg.Error:
            connection.close()
            raise
        self._connection = connection
        return connection

    def drop_if_lost(self) -> None:
        """Forget a connection that cannot be used any more."""
        if self._connection is not None and self._connection.closed:
            self._connection = None
            self._may_claim_at = time.monotonic() + _RETURN_S

    def close(self) -> None:
        """See `Connection`."""
        # What comes too late must not connect again.
        self._failed_at = math.inf
        if self._connection is not None:
            self._connection.close()

    def execute(self, statement: str, values: Values = (), /) -> Rows:
        """See `Connection`."""
        with _raising(self):
            given = _row(values) if isinstance(values, Sequence) else {key: _plain(one) for key, one in values.items()}
            return self._usable().execute(_translated(statement), given)

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> None:
        """See `Connection`."""
        with _raising(self), psycopg.Cursor(self._usable()) as cursor:  # Many at a time, not one after the other.
            cursor.executemany(_translated(statement), map(_row, rows))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """See `Connection`."""
        with self._until_committed(self._begin_to_write):
            yield

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """See `Connection`."""
        with self._until_committed("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"):
            yield

    @contextmanager
    def _until_committed(self, begin: str) -> Iterator[None]:
        try:
            self.execute(begin)
            yield
            if self._is_open:
                self.execute("COMMIT")
        except BaseException:
            with suppress(PostgresError):
                self.rollback()
            raise

    @property
    def _is_open(self) -> bool:
        """Whether a transaction is open."""
        connection = self._connection
        return connection is not None and connection.info.transaction_status is not TransactionStatus.IDLE

    def rollback(self) -> None:
        """See `Connection`."""
        if self._is_open:
            self.execute("ROLLBACK")

    def migrate(self, versions: Versions) -> None:
        """See `Connection`."""
        with self.transaction():
            self.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
            self.execute("CREATE TABLE IF NOT EXISTS version (number BIGINT NOT NULL)")
            rows = self.execute("SELECT number FROM version").fetchall()
            version = rows[0][0] if rows else 0
            if not rows:
                self.execute("INSERT INTO version VALUES (0)")
            for statement in chain.from_iterable(versions[version:]):
                self.execute(_of_tables(statement))
            self.execute("UPDATE version SET number = ?", (max(version, len(versions)),))
        if version > len(versions):
            raise VersionError(version, len(versions))

    def claim(self, table: str, condition: str, values: Sequence[object] = ()) -> None:
        """See `Connection`."""
        if time.monotonic() < self._may_claim_at:
            return
        with self.transaction():
            self.execute(
                f"UPDATE {table} SET server = ? WHERE {condition} AND server <> ? "  # noqa: S608
                f"AND NOT EXISTS ({_CONNECTED.format(servers=_SERVERS)})",
                (self.server, *values, self.server),
            )


@contextmanager
def _raising(connection: Postgres) -> Iterator[None]:
    """Raise psycopg's errors as PostgresError."""
    try:
        yield
    except psycopg.Error as error:
        connection.drop_if_lost()
        is_away = isinstance(error, psycopg.OperationalError)
        raise PostgresError(str(error).strip() or type(error).__name__, is_away=is_away) from error


def _row(values: Sequence[Any]) -> list[Any]:
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    match value:
        case str():
            # Texts cannot have it. An enumeration is its value.
            return str(value).replace("\0", "\N{REPLACEMENT CHARACTER}")
        case int() if not isinstance(value, bool):
            return int(value)
        case _:
            return value


def _translated(statement: str) -> Any:
    """Return a statement with psycopg's placeholders. Psycopg's types allow only texts that are in the source."""
    return re.sub(r":([a-z_]+)", r"%(\1)s", statement.replace("%", "%%").replace("?", "%s"))


def _of_tables(statement: str) -> str:
    """Return a statement that makes tables, indexes or triggers, in PostgreSQL's words."""
    trigger = _TRIGGER.fullmatch(statement)
    if trigger is not None:
        name, moment, changes = trigger.groups()
        return (
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {changes} RETURN NULL; END $$;"
            f"CREATE TRIGGER {name} {moment} FOR EACH ROW EXECUTE FUNCTION {name}()"
        )
    statement = re.sub("|".join(_TYPES), lambda found: _TYPES[found[0]], statement)
    return statement.replace("WITHOUT ROWID", "")
