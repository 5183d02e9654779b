"""Jobs in a database: responses that are generated in the background, with their events and tokens so far."""

import zlib
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from caravan_dialects.conversations.nodes import Added, Job, JobEnd, Position, Step, UnderWay
from caravan_dialects.sql.connection import Connection
from caravan_scheduler.core.tokens import GeneratedToken

# Bytes that a row takes beside its contents, roughly.
_JOB_BYTES, _STEP_BYTES = 400, 60
# Most events of a job that are read at once.
MOST_EVENTS = 512
_EVENTS = msgspec.msgpack.Decoder(tuple[bytes, ...])
_TOKENS = msgspec.msgpack.Decoder(tuple[GeneratedToken, ...])
_encode = msgspec.msgpack.encode

# Steps go with their job. The bytes of both count for its owner.
TABLES = (
    """
    CREATE TABLE jobs (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        request BLOB NOT NULL,
        response BLOB NOT NULL,
        next INTEGER NOT NULL,
        ended BOOLEAN NOT NULL DEFAULT FALSE,
        size INTEGER NOT NULL,
        used REAL NOT NULL
    )
    """,
    "CREATE INDEX jobs_ended ON jobs (owner, used) WHERE ended",
    "CREATE INDEX jobs_under_way ON jobs (id) WHERE NOT ended",
    """
    CREATE TABLE job_steps (
        number INTEGER PRIMARY KEY,
        job TEXT NOT NULL,
        first INTEGER NOT NULL,
        events BLOB NOT NULL,
        tokens BLOB NOT NULL,
        feedback REAL
    )
    """,
    "CREATE INDEX steps_of_job ON job_steps (job, first, number)",
    """
    CREATE TRIGGER job_added AFTER INSERT ON jobs BEGIN
        INSERT INTO usage VALUES (NEW.owner, NEW.size) ON CONFLICT (owner) DO UPDATE SET bytes = usage.bytes + NEW.size;
    END
    """,
    """
    CREATE TRIGGER job_resized AFTER UPDATE OF size ON jobs BEGIN
        UPDATE usage SET bytes = bytes + NEW.size - OLD.size WHERE owner = NEW.owner;
    END
    """,
    """
    CREATE TRIGGER job_removed AFTER DELETE ON jobs BEGIN
        UPDATE usage SET bytes = bytes - OLD.size WHERE owner = OLD.owner;
        DELETE FROM job_steps WHERE job = OLD.id;
    END
    """,
)

# ``server``: the number of the connection whose server works on the job.
SHARED = (
    "ALTER TABLE jobs ADD COLUMN server INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE jobs ADD COLUMN cancelled BOOLEAN NOT NULL DEFAULT FALSE",
)

# ``node``, ``items``: the position that the job extends. No items: it is not known.
POSITIONS = (
    "ALTER TABLE jobs ADD COLUMN node TEXT",
    "ALTER TABLE jobs ADD COLUMN items INTEGER",
    """
    CREATE TRIGGER job_extends AFTER INSERT ON jobs BEGIN
        UPDATE nodes SET refs = refs + 1 WHERE id = NEW.node;
    END
    """,
    """
    CREATE TRIGGER job_ended AFTER UPDATE OF node ON jobs BEGIN
        UPDATE nodes SET refs = refs - 1 WHERE id = OLD.node;
    END
    """,
    """
    CREATE TRIGGER job_extends_no_more AFTER DELETE ON jobs BEGIN
        UPDATE nodes SET refs = refs - 1 WHERE id = OLD.node;
    END
    """,
)


class JobTable:
    """The jobs of one database. ``now`` is Unix time in seconds in all methods."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._run = connection.execute

    def add(self, job: Job, step: Step, now: float, most: int | None = None) -> Added:
        """Add a job with its first ``step``, if there is none of its id.

        ``most``: jobs that an owner may have under way, if several servers share the database.
        """
        size = len(job.request) + len(job.response) + _JOB_BYTES
        with self._connection.transaction():
            if self._run("SELECT 1 FROM jobs WHERE id = ?", (job.id,)).fetchone() is not None:
                return Added.KNOWN
            # A single server counts those that it works on.
            if most is not None and self._connection.is_shared and self._under_way_of(job.owner) >= most:
                return Added.FULL
            at = job.position
            place = (None, None) if at is None else (at.node or None, at.items)
            row = (job.id, job.owner, job.request, job.response, size, now, self._connection.server, *place)
            self._run(
                "INSERT INTO jobs (id, owner, request, response, next, size, used, server, node, items) "
                "VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?, ?)",
                row,
            )
            self._append(job.id, step)
        return Added.ADDED

    def _under_way_of(self, owner: str) -> int:
        row = self._run("SELECT count(*) FROM jobs WHERE NOT ended AND owner = ?", (owner,)).fetchone()
        return int(row[0])

    def append(self, job_id: str, step: Step) -> bool:
        """Add a step. Return False and change nothing if it does not follow the last one.

        So it is if the job was deleted, or is another server's by now.
        """
        with self._connection.transaction():
            return self._append(job_id, step)

    def replace_tokens(self, job_id: str, step: Step, request: bytes) -> bool:
        """Add a step, and replace all tokens before it by the ``request``, which has what they stand for.

        Like `append`, return False and change nothing if the step does not follow the last one.
        """
        with self._connection.transaction():
            if not self._append(job_id, step):
                return False
            none = _encode(())
            freed = "(SELECT coalesce(sum(length(tokens) - ?), 0) FROM job_steps WHERE job = ?)"
            self._run(
                f"UPDATE jobs SET size = size + ? - length(request) - CAST({freed} AS INTEGER), request = ? "  # noqa: S608
                "WHERE id = ?",
                (len(request), len(none), job_id, request, job_id),
            )
            self._run("UPDATE job_steps SET tokens = ?, feedback = NULL WHERE job = ?", (none, job_id))
            return True

    def _append(self, job_id: str, step: Step) -> bool:
        events = zlib.compress(_encode(step.events), 1)
        tokens = _encode(step.tokens)
        size = len(events) + len(tokens) + _STEP_BYTES
        end = step.first + len(step.events)
        moved = self._run(
            "UPDATE jobs SET next = ?, size = size + ? WHERE id = ? AND next = ? AND server = ? AND NOT ended",
            (end, size, job_id, step.first, self._connection.server),
        )
        if not moved.rowcount:
            return False
        self._run(
            "INSERT INTO job_steps (job, first, events, tokens, feedback) VALUES (?, ?, ?, ?, ?)",
            (job_id, step.first, events, tokens, step.feedback),
        )
        return True

    def end(self, end: JobEnd, now: float) -> bool:
        """Note the end of a job, whose events are kept for clients; see `append`. Call it in a transaction."""
        if not self._append(end.id, end.step):
            return False
        self._run(
            "UPDATE jobs SET ended = TRUE, request = ?, response = ?, used = ?, node = NULL, items = NULL, "
            "size = size - length(request) - length(response) + ? WHERE id = ?",
            (b"", end.response, now, len(end.response), end.id),
        )
        return True

    def under_way(self, passed_on: Collection[str] = ()) -> list[UnderWay]:
        """Return the jobs that have not ended and no other server works on.

        ``passed_on``: ids of jobs that this server left to others, which it takes back only later.
        """
        others = f" AND id NOT IN ({', '.join('?' * len(passed_on))})" if passed_on else ""
        self._connection.claim("jobs", f"NOT ended{others}", tuple(passed_on))
        query = "SELECT owner, id, cancelled FROM jobs WHERE NOT ended AND server = ? ORDER BY used"
        rows = self._run(query, (self._connection.server,))
        return [UnderWay(owner=owner, id=job, cancelled=bool(cancelled)) for owner, job, cancelled in rows]

    def leave(self) -> None:
        """Let other servers continue the jobs of this one."""
        self._run("UPDATE jobs SET server = 0 WHERE NOT ended AND server = ?", (self._connection.server,))

    def pass_on(self, job_id: str) -> None:
        """Let other servers continue a job of this one."""
        own = (job_id, self._connection.server)
        self._run("UPDATE jobs SET server = 0 WHERE id = ? AND NOT ended AND server = ?", own)

    def cancel(self, owner: str, job_id: str) -> bool:
        """Ask the server of a job to cancel it; return False if the owner has none of this id under way."""
        query = "UPDATE jobs SET cancelled = TRUE WHERE id = ? AND owner = ? AND NOT ended"
        return self._run(query, (job_id, owner)).rowcount > 0

    def has_ended(self, job_id: str) -> bool:
        """Return whether nothing is added to a job any more, also because it was deleted."""
        row = self._run("SELECT ended FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return row is None or bool(row[0])

    def find(self, owner: str, job_id: str) -> Job | None:
        """Return a job; None if the owner has none of this id."""
        query = "SELECT id, owner, request, response, ended, next, node, items FROM jobs WHERE id = ? AND owner = ?"
        row = self._run(query, (job_id, owner)).fetchone()
        return None if row is None else _job(row)

    def events(self, job_id: str, first: int) -> list[bytes]:
        """Return events from the number ``first`` on, at least one if there are any, without those of later steps."""
        found: list[bytes] = []
        last = 0
        query = (
            "SELECT number, first, events FROM job_steps WHERE job = ? AND first >= "
            "(SELECT max(first) FROM job_steps WHERE job = ? AND first <= ?) AND number > ? ORDER BY number LIMIT ?"
        )
        while rows := self._run(query, (job_id, job_id, first, last, MOST_EVENTS)).fetchall():
            for last, start, events in rows:  # noqa: B007  the next query begins after it
                found += _EVENTS.decode(zlib.decompress(events))[max(0, first - start) :]
                if len(found) >= MOST_EVENTS:
                    return found
        return found

    def tokens(self, job_id: str) -> tuple[list[GeneratedToken], float | None]:
        """Return the tokens of a job so far, and the feedback of the last step that has any."""
        found: list[GeneratedToken] = []
        feedback = None
        query = "SELECT tokens, feedback FROM job_steps WHERE job = ? ORDER BY number"
        for tokens, value in self._run(query, (job_id,)):
            if more := _TOKENS.decode(tokens):
                found += more
                feedback = value
        return found, feedback


def _job(row: Sequence[Any]) -> Job:
    job_id, owner, request, response, ended, number, node, items = row
    return Job(
        id=job_id,
        owner=owner,
        request=bytes(request),
        response=bytes(response),
        ended=bool(ended),
        next=number,
        position=None if items is None else Position(node=node or "", items=items),
    )
