"""Jobs in SQLite: responses that are generated in the background, with their events and tokens so far."""

import sqlite3
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from caravan_dialects.conversations.nodes import Job, JobEnd, Step
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
        ended INTEGER NOT NULL DEFAULT 0,
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
        INSERT INTO usage VALUES (NEW.owner, NEW.size) ON CONFLICT DO UPDATE SET bytes = bytes + NEW.size;
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


class JobTable:
    """The jobs of one database. ``now`` is Unix time in seconds in all methods."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._run = connection.execute

    def add(self, job: Job, step: Step, now: float) -> None:
        """Add a job with its first ``step``."""
        size = len(job.request) + len(job.response) + _JOB_BYTES
        with self._connection:
            self._run("BEGIN IMMEDIATE")
            row = (job.id, job.owner, job.request, job.response, size, now)
            self._run("INSERT INTO jobs VALUES (?, ?, ?, ?, 0, 0, ?, ?)", row)
            self._append(job.id, step)

    def append(self, job_id: str, step: Step) -> None:
        """Add a step. One that does not follow the last one, or whose job was deleted, changes nothing."""
        with self._connection:
            self._run("BEGIN IMMEDIATE")
            self._append(job_id, step)

    def replace_tokens(self, job_id: str, step: Step, request: bytes) -> None:
        """Add a step, and replace all tokens before it by the ``request``, which has what they stand for.

        Like `append`, it changes nothing if the step does not follow the last one.
        """
        with self._connection:
            self._run("BEGIN IMMEDIATE")
            if self._append(job_id, step):
                none = _encode(())
                freed = "(SELECT total(length(tokens) - ?) FROM job_steps WHERE job = ?)"
                self._run(
                    f"UPDATE jobs SET size = size + ? - length(request) - CAST({freed} AS INTEGER), request = ? "  # noqa: S608
                    "WHERE id = ?",
                    (len(request), len(none), job_id, request, job_id),
                )
                self._run("UPDATE job_steps SET tokens = ?, feedback = NULL WHERE job = ?", (none, job_id))

    def _append(self, job_id: str, step: Step) -> bool:
        """Return whether the step follows the last one."""
        events = zlib.compress(_encode(step.events), 1)
        tokens = _encode(step.tokens)
        size = len(events) + len(tokens) + _STEP_BYTES
        end = step.first + len(step.events)
        moved = self._run(
            "UPDATE jobs SET next = ?, size = size + ? WHERE id = ? AND next = ?", (end, size, job_id, step.first)
        )
        if moved.rowcount:
            self._run(
                "INSERT INTO job_steps (job, first, events, tokens, feedback) VALUES (?, ?, ?, ?, ?)",
                (job_id, step.first, events, tokens, step.feedback),
            )
        return bool(moved.rowcount)

    def end(self, end: JobEnd, now: float) -> None:
        """Note the end of a job, whose events are kept for clients. Call it in a transaction."""
        self._append(end.id, end.step)
        self._run(
            "UPDATE jobs SET ended = 1, request = x'', response = ?, used = ?, "
            "size = size - length(request) - length(response) + ? WHERE id = ?",
            (end.response, now, len(end.response), end.id),
        )

    def under_way(self) -> list[Job]:
        """Return the jobs that have not ended."""
        rows = self._run("SELECT id, owner, request, response, ended, next FROM jobs WHERE NOT ended ORDER BY used")
        return [_job(row) for row in rows]

    def find(self, owner: str, job_id: str) -> Job | None:
        """Return a job; None if the owner has none of this id."""
        query = "SELECT id, owner, request, response, ended, next FROM jobs WHERE id = ? AND owner = ?"
        row = self._run(query, (job_id, owner)).fetchone()
        return None if row is None else _job(row)

    def events(self, job_id: str, first: int) -> list[bytes]:
        """Return events from the number ``first`` on, at least one if there are any, without those of later steps."""
        found: list[bytes] = []
        query = (
            "SELECT first, events FROM job_steps WHERE job = ? AND first >= "
            "(SELECT max(first) FROM job_steps WHERE job = ? AND first <= ?) ORDER BY number"
        )
        for start, events in self._run(query, (job_id, job_id, first)):
            found += _EVENTS.decode(zlib.decompress(events))[max(0, first - start) :]
            if len(found) >= MOST_EVENTS:
                break
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
    job_id, owner, request, response, ended, number = row
    return Job(id=job_id, owner=owner, request=bytes(request), response=bytes(response), ended=bool(ended), next=number)
