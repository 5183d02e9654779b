"""Keeps nodes and heads in a database. Calls block, and all of them come from one thread."""

import logging
import math
import os
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from caravan_dialects.conversations.job_table import JobTable
from caravan_dialects.conversations.nodes import (
    START,
    Chain,
    ExactTokens,
    Head,
    Json,
    Node,
    Position,
    Transaction,
)
from caravan_dialects.conversations.packing import packed, referenced, unpacked, with_files, without_files
from caravan_dialects.conversations.tables import ADD_FILE, ADD_NODE, CHAIN, NAME_FILE, READ_FILE, VERSIONS
from caravan_dialects.sql.connection import SQL_ERRORS, Connection, Place, VersionError, connected
from caravan_scheduler.core.tokens import common_length

# Deleting writes as much as it erases, until SQLite has moved that into its file.
RESERVED_BYTES = 1 << 20

log = logging.getLogger(__name__)
# Bytes that a row takes beside its contents, roughly.
_ROW_BYTES = 400
# Expired entries are looked for, and an entry that is used again is written, once in this many seconds.
_SWEEP_S = 1.0
_TOUCH_S = 30.0
_SCHEMA = "caravan_conversations"
_ITEMS = msgspec.json.Decoder(tuple[Json, ...])
_METADATA = msgspec.json.Decoder(dict[str, str])
_encode = msgspec.json.encode


class Reserve:
    """A file beside that of the store, whose bytes are given up for a moment. Without a file, it does nothing."""

    def __init__(self, file: Path | None) -> None:
        """``file``: that of the store."""
        self._path = None if file is None else file.with_name(f"{file.name}-reserve")
        self._log = None if file is None else file.with_name(f"{file.name}-wal")
        self._is_whole = False
        self.fill()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give the room up for the block."""
        if self._path is not None:
            self._is_whole = False
            os.truncate(self._path, 0)
        try:
            yield
        finally:
            self.fill()

    def free_bytes(self) -> int:
        """Return how much room the disk has now."""
        if self._path is None:
            return sys.maxsize
        disk = os.statvfs(self._path)
        return disk.f_bavail * disk.f_frsize

    def log_bytes(self) -> int:
        """Return how long SQLite's log is."""
        return self._log.stat().st_size if self._log is not None and self._log.exists() else 0

    def fill(self) -> None:
        """Take the room, if it is there and was not taken yet."""
        if self._path is None or self._is_whole:
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVED_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            log.info("no room could be reserved for deleting conversations on a full disk: %s", error)
        else:
            self._is_whole = True


# Pages of SQLite's log until they are moved into the file.
_LOG_PAGES, _PAGE_BYTES = 128, 4096


class StateFileError(Exception):
    """The file, or the database, cannot be used as a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """``max_bytes``: size of all entries together. ``life_s``: from the last use of an entry to its end.

    ``job_life_s``: how long the events of a job are kept after its end.
    """

    max_bytes: int
    life_s: float
    job_life_s: float = math.inf


class Database:
    """The tables, at ``place``. ``pinned``: ids of nodes and heads that must stay.

    ``now`` is Unix time in seconds in all methods. An entry goes when it expires, or when room is needed: then the
    owner of most bytes loses its least recently used entries first. A node stays while it has children, heads or jobs.
    """

    def __init__(self, place: Place, bounds: Bounds, pinned: Container[str] = ()) -> None:
        """Raises StateFileError."""
        self._bounds = bounds
        self._pinned = pinned
        self._swept = 0.0
        try:
            file = place if isinstance(place, Path) else None
            if file is not None:
                # SQLite gives its other files the same mode.
                file.touch(mode=0o600)
            self._connection: Connection = connected(place, _SCHEMA)
            if not self._connection.is_shared:
                self._prepare_file()
            self._connection.migrate(VERSIONS)
            self._reserve = Reserve(file)
            self.jobs = JobTable(self._connection)
        except (*SQL_ERRORS, VersionError, OSError) as error:
            raise StateFileError(str(error)) from error

    def _prepare_file(self) -> None:
        run = self._connection.execute
        # The log is short, so that little room is needed to move what it has into the file of a full disk.
        run(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        run(f"PRAGMA journal_size_limit = {_LOG_PAGES * _PAGE_BYTES}")
        # Nothing stays in the file of what was deleted.
        run("PRAGMA secure_delete = ON")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def node(self, owner: str, node_id: str, now: float) -> Chain | None:
        """Return the chain that ends with a response; None if the owner has no response of this id."""
        row = self._used("nodes", "count", node_id, owner, now)
        if row is None:
            return None
        return self.chain(owner, Position(node=node_id, items=row[0]))

    def response(self, owner: str, node_id: str, now: float) -> bytes | None:
        """Return the JSON of a response, and read nothing else of its chain; None if the owner has none of this id."""
        row = self._used("nodes", "response", node_id, owner, now)
        return None if row is None else bytes(row[0])

    def conversation(self, owner: str, head_id: str, now: float) -> tuple[Head, Chain] | None:
        """Return a head and its chain; None if the owner has no head of this id."""
        head = self.head(owner, head_id, now)
        chain = None if head is None else self.chain(owner, head.position)
        return None if head is None or chain is None else (head, chain)

    def head(self, owner: str, head_id: str, now: float) -> Head | None:
        """Return a head, and read nothing of its chain; None if the owner has no head of this id."""
        row = self._used("heads", "node, items, metadata, created", head_id, owner, now)
        if row is None:
            return None
        node, items, metadata, created = row
        position = Position(node=node or "", items=items)
        return Head(id=head_id, created=created, position=position, metadata=_METADATA.decode(metadata))

    def _used(self, table: str, columns: str, entry: str, owner: str, now: float) -> Sequence[Any] | None:
        """Return ``columns`` of an entry, and note its use; None if the owner has none of this id."""
        self._sweep(now)
        condition = "id = ? AND owner = ?" if table == "heads" else "id = ? AND owner = ? AND named"
        query = f"SELECT used, {columns} FROM {table} WHERE {condition}"  # noqa: S608
        row = self._connection.execute(query, (entry, owner)).fetchone()
        if row is None:
            return None
        if now - row[0] >= min(_TOUCH_S, self._bounds.life_s / 2):
            with _tolerating():
                self._connection.execute(f"UPDATE {table} SET used = ? WHERE id = ?", (now, entry))  # noqa: S608
        found: Sequence[Any] = row[1:]
        return found

    def commit(self, owner: str, transaction: Transaction, now: float) -> bool:
        """Write all of ``transaction``, or nothing: then return False.

        It does not fit if the head or the parent is not there, or if the job is another server's or was deleted.
        """
        with self._connection.transaction():
            # The node comes first: the head may point at it.
            written = self._add_node(owner, transaction.node, now) and self._write_head(owner, transaction, now)
            if not (written and (transaction.ended is None or self.jobs.end(transaction.ended, now))):
                self._connection.rollback()
                return False
            self._remove_abandoned()
        with _tolerating():
            self._make_room()
        return True

    def delete_response(self, owner: str, response_id: str) -> bool:
        """Forget a response and its job; return False if there is none. Its items stay while others continue it."""
        forgotten = self._forget("DELETE FROM jobs WHERE id = ? AND owner = ?", (response_id, owner))
        named = "UPDATE nodes SET named = FALSE WHERE id = ? AND owner = ? AND named"
        return self._forget(named, (response_id, owner)) or forgotten

    def delete_head(self, owner: str, head_id: str) -> bool:
        """Forget a conversation; return False if there is none. Its responses stay."""
        return self._forget("DELETE FROM heads WHERE id = ? AND owner = ?", (head_id, owner))

    def _forget(self, statement: str, entry: tuple[str, str]) -> bool:
        """Make an entry unknown to clients, and remove what nobody can name then; return False if there is none."""
        try:
            with self._connection.transaction():
                found = self._connection.execute(statement, entry)
                self._remove_abandoned()
        except SQL_ERRORS as error:
            if self._connection.is_shared:
                raise
            log.info("an entry is deleted with the room that is reserved for this: %s", error)
            with self._reserve.released():
                # A few pages. What clients cannot name any more is removed in small steps, as far as there is room.
                found = self._connection.execute(statement, entry)
                with _tolerating():
                    self._make_log_short()
                    while one := self._abandoned()[:1]:
                        self._connection.execute("DELETE FROM nodes WHERE id = ?", one)
                        self._make_log_short()
        return found.rowcount > 0

    def _make_log_short(self) -> None:
        """Give the room of SQLite's log back to the disk, if all of it fits the file: a part would only take room."""
        if self._reserve.free_bytes() >= self._reserve.log_bytes():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def used_bytes(self) -> dict[str, int]:
        """Return the bytes that each owner holds."""
        return dict(self._connection.execute("SELECT owner, bytes FROM usage WHERE bytes > 0"))

    def chain(self, owner: str, position: Position) -> Chain | None:
        """Return the chain that ends at a position; None if it was removed since that was read."""
        if position == START:
            return Chain()
        with self._connection.snapshot():
            rows = self._rows(owner, position)
            if not rows:
                return None
            size, nodes = 0, []
            files: dict[bytes, str] = {}
            for node_id, parent, parent_items, upto, data, inputs, response, *_ in rows:
                items = _ITEMS.decode(data)
                size += len(data) if upto == len(items) else len(_encode(items[:upto]))
                items = items[:upto]
                for digest in referenced(items):
                    if digest not in files:
                        ((files[digest],),) = self._connection.execute(READ_FILE, (owner, digest))
                    size += len(files[digest])
                before = Position(node=parent or "", items=parent_items)
                nodes.append(
                    Node(id=node_id, parent=before, items=with_files(items, files), inputs=inputs, response=response)
                )
            return Chain(position=position, nodes=nodes, size=size, tokens=_tokens_of(rows))

    def _rows(self, owner: str, position: Position) -> list[tuple[Any, ...]]:
        """Return the rows of `CHAIN`, the first node first."""
        place = {"node": position.node, "items": position.items, "owner": owner, "none": b""}
        return self._connection.execute(CHAIN, place).fetchall()

    def _add_node(self, owner: str, node: Node | None, now: float) -> bool:
        if node is None:
            return True
        if not self._has(owner, node.parent):
            return False
        fingerprint, shared, added = "", 0, b""
        if node.tokens is not None:
            fingerprint = node.tokens.fingerprint
            before = _tokens_of(self._rows(owner, node.parent))
            if before is not None and before.fingerprint == fingerprint:
                shared = common_length(before.token_ids, node.tokens.token_ids)
            added = packed(node.tokens.token_ids[shared:])
        slim, files = without_files(node.items)
        items = _encode(slim)
        row = {
            "id": node.id,
            "owner": owner,
            "parent": node.parent.node or None,
            "parent_items": node.parent.items,
            "items": items,
            "count": len(node.items),
            "inputs": node.inputs,
            "response": node.response,
            "fingerprint": fingerprint,
            "shared": shared,
            "tokens": added,
            "named": bool(node.response),
            "size": len(items) + len(node.response) + len(added) + _ROW_BYTES,
            "used": now,
        }
        self._connection.execute(ADD_NODE, row)
        for digest, content in files.items():
            self._connection.execute(ADD_FILE, (owner, digest, content, len(content) + _ROW_BYTES))
            self._connection.execute(NAME_FILE, (node.id, owner, digest))
        return True

    def _write_head(self, owner: str, transaction: Transaction, now: float) -> bool:
        head, expected = transaction.head, transaction.expected
        if head is None:
            return True
        if not self._has(owner, head.position):
            return False
        metadata = _encode(head.metadata)
        size = len(metadata) + _ROW_BYTES
        node, items = head.position.node or None, head.position.items
        if expected is None:
            self._connection.execute(
                "INSERT INTO heads VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (head.id, owner, node, items, metadata, head.created, size, now),
            )
            return True
        columns, values = ("", ()) if transaction.moves else (", metadata = ?, size = ?", (metadata, size))
        written = self._connection.execute(
            f"UPDATE heads SET node = ?, items = ?, used = ?{columns} "  # noqa: S608
            "WHERE id = ? AND owner = ? AND coalesce(node, '') = ? AND items = ?",
            (node, items, now, *values, head.id, owner, expected.node, expected.items),
        )
        return written.rowcount > 0

    def _has(self, owner: str, position: Position) -> bool:
        if position == START:
            return True
        row = self._connection.execute(
            "SELECT count FROM nodes WHERE id = ? AND owner = ?", (position.node, owner)
        ).fetchone()
        return row is not None and 0 < position.items <= row[0]

    def _sweep(self, now: float) -> None:
        """Remove what has expired."""
        if 0 <= now - self._swept < min(_SWEEP_S, self._bounds.life_s / 4):
            return
        self._swept = now
        oldest = now - self._bounds.life_s
        heads, nodes = "used < ?", "refs = 0 AND used < ?"
        with _tolerating():
            self._reserve.fill()
            while expired := self._oldest("heads", heads, oldest) + self._oldest("nodes", nodes, oldest):
                self._remove(expired)
            oldest = now - min(self._bounds.life_s, self._bounds.job_life_s)
            while expired := self._oldest("jobs", "ended AND used < ?", oldest):
                self._remove(expired)

    def _make_room(self) -> None:
        """Remove entries until all together fit, from the owner of most bytes first."""
        run = self._connection.execute
        while True:
            ((total,),) = run("SELECT CAST(coalesce(sum(bytes), 0) AS BIGINT) FROM usage")
            if total <= self._bounds.max_bytes:
                return
            ((owner,),) = run("SELECT owner FROM usage ORDER BY bytes DESC LIMIT 1")
            oldest = [
                *self._oldest("heads", "owner = ?", owner),
                *self._oldest("nodes", "refs = 0 AND owner = ?", owner),
                *self._oldest("jobs", "ended AND owner = ?", owner),
            ]
            if not oldest:
                # Only entries in use are left.
                return
            # A few at a time: each of them may free nodes that are older than the next one.
            self._remove(sorted(oldest)[: max(1, len(oldest) // 16)])

    def _oldest(self, table: str, condition: str, value: str | float) -> list[tuple[float, str, str]]:
        """Return the time of use, the table and the id of some entries, the least recently used first."""
        query = f"SELECT used, id FROM {table} WHERE {condition} ORDER BY used LIMIT 256"  # noqa: S608
        rows = self._connection.execute(query, (value,))
        return [(used, table, entry) for used, entry in rows if entry not in self._pinned]

    def _remove(self, entries: Sequence[tuple[float, str, str]]) -> None:
        with self._connection.transaction():
            for _, table, entry in entries:
                condition = "id = ? AND refs = 0" if table == "nodes" else "id = ?"
                self._connection.execute(f"DELETE FROM {table} WHERE {condition}", (entry,))  # noqa: S608
            self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Remove nodes that no client can name and nothing continues, and their ancestors of which that is true."""
        while ids := self._abandoned():
            self._connection.executemany("DELETE FROM nodes WHERE id = ?", [(node,) for node in ids])

    def _abandoned(self) -> list[str]:
        found = self._connection.execute("SELECT id FROM nodes WHERE refs = 0 AND NOT named LIMIT 256").fetchall()
        return [node for (node,) in found if node not in self._pinned]


@contextmanager
def _tolerating() -> Iterator[None]:
    """Log an error of a block that only tidies up: a file that cannot be written can still be read."""
    try:
        yield
    except SQL_ERRORS as error:
        log.warning("entries cannot be removed, or marked as used: %s", error)


def _tokens_of(rows: Sequence[tuple[Any, ...]]) -> ExactTokens | None:
    """Return the tokens of the last node of a chain that has some, from the rows of `CHAIN`."""
    parts: list[Sequence[int]] = []
    # The tokens of a node that its successors share; None for all.
    wanted = None
    fingerprint = ""
    for *_, name, shared, added in reversed(rows):
        if not name:
            continue
        own = unpacked(added)
        if wanted is None:
            fingerprint, wanted = name, shared + len(own)
        parts.append(own[: max(0, wanted - shared)])
        wanted = min(wanted, shared)
        if not wanted:
            break
    if not fingerprint:
        return None
    return ExactTokens(fingerprint=fingerprint, token_ids=tuple(chain.from_iterable(reversed(parts))))
