"""The store of what was counted: one table in SQLite. Calls block, and all of them come from one thread."""

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from caravan_dialects.auth.usage import Account, Counts, Kind, first_day_of_month

_VERSION = 1
# Another router may write to the file for a moment.
_BUSY_S = 10.0
_COLUMNS = Counts._fields
_CREATE = f"""
CREATE TABLE usage (
    day INTEGER NOT NULL, key TEXT NOT NULL, session TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL,
    -- The router process that has counted. Its counts only grow, so writing them twice changes nothing.
    run TEXT NOT NULL,
    {", ".join(f"{name} INTEGER NOT NULL" for name in _COLUMNS)},
    PRIMARY KEY (day, key, session, model, kind, run)
) WITHOUT ROWID
"""
_SAVE = f"""
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?{", ?" * len(_COLUMNS)})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = max({name}, excluded.{name})" for name in _COLUMNS)}
"""  # noqa: S608  no input
_SUMS = ", ".join(f"sum({name})" for name in _COLUMNS)
# Fields of an account by which a query may keep its rows apart.
GROUPS = ("key", "session", "model")


class UsageFileError(Exception):
    """The file cannot be used as a store of usage."""


class UsageTable:
    """The counts of all days and routers. The methods raise sqlite3.Error."""

    def __init__(self, file: Path | None) -> None:
        """Open ``file``, or keep everything in memory for None. Raises UsageFileError."""
        try:
            if file is not None:
                os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            name = ":memory:" if file is None else str(file)
            self._database = sqlite3.connect(name, timeout=_BUSY_S, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                [version] = self._database.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    self._database.execute(_CREATE)
                    self._database.execute(f"PRAGMA user_version = {_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise UsageFileError(f"{file}: {error}") from error
        if version not in {0, _VERSION}:
            raise UsageFileError(f"{file}: a newer version of Caravan wrote it")

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def save(self, run: str, rows: Iterable[tuple[Account, Counts]]) -> None:
        """Write what the router process ``run`` has counted so far."""
        values = [
            (account.day, account.key, account.session, account.model, account.kind.value, run, *counts)
            for account, counts in rows
        ]
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(_SAVE, values)

    def forget_before(self, day: int) -> None:
        """Delete what was counted before ``day``."""
        self._database.execute("DELETE FROM usage WHERE day < ?", (day,))

    def spent(self, day: int, but: str) -> dict[str, tuple[int, int]]:
        """Return the tokens that each key has used on ``day``, and in its month; not those that ``but`` has counted."""
        found = self._database.execute(
            "SELECT key, sum((prompt + output) * (day = ?)), sum(prompt + output) FROM usage "
            "WHERE day BETWEEN ? AND ? AND run != ? GROUP BY key",
            (day, first_day_of_month(day), day, but),
        )
        return {key: (today, this_month) for key, today, this_month in found}

    def read(
        self, days: range, kind: Kind, groups: Iterable[str], only: dict[str, list[str]]
    ) -> list[tuple[Account, Counts]]:
        """Return what was counted on each of ``days``, by day and by those of `GROUPS` that ``groups`` has.

        The other fields of the accounts are empty. ``only``: the values that count, by fields of `GROUPS`.
        """
        named = [name if name in groups else "''" for name in GROUPS]
        wheres, values = ["day >= ? AND day < ? AND kind = ?"], list[Any]([days.start, days.stop, kind.value])
        for name, allowed in only.items():
            wheres.append(f"{name} IN ({', '.join('?' * len(allowed))})")
            values += allowed
        found = self._database.execute(
            f"SELECT day, {', '.join(named)}, {_SUMS} FROM usage WHERE {' AND '.join(wheres)} "  # noqa: S608  no input
            f"GROUP BY day{''.join(f', {name}' for name in GROUPS if name in groups)} ORDER BY 1, 2, 3, 4",
            values,
        )
        return [
            (Account(day, key, session, model, kind), Counts(*counts)) for day, key, session, model, *counts in found
        ]
