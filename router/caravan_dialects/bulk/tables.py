"""The tables of files and batches."""

_FIRST = (
    """
    CREATE TABLE files (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        purpose TEXT NOT NULL,
        name TEXT NOT NULL,
        size INTEGER NOT NULL,
        created REAL NOT NULL,
        expires REAL
    )
    """,
    "CREATE INDEX files_of_owner ON files (owner, created)",
    """
    CREATE TABLE batches (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        status TEXT NOT NULL,
        created REAL NOT NULL,
        -- JSON of the whole record.
        record BLOB NOT NULL
    )
    """,
    "CREATE INDEX batches_of_owner ON batches (owner, created)",
    """
    CREATE TABLE lines (
        batch TEXT NOT NULL,
        number INTEGER NOT NULL,
        custom_id TEXT NOT NULL,
        start INTEGER NOT NULL,
        size INTEGER NOT NULL,
        rank INTEGER NOT NULL,
        -- A line of an output file, and its `AnswerKind`. NULL: not answered yet.
        answer BLOB,
        kind INTEGER,
        PRIMARY KEY (batch, number)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX unanswered ON lines (batch, rank) WHERE answer IS NULL",
)

_SHARED = (
    # The number of the connection whose server works on the batch.
    "ALTER TABLE batches ADD COLUMN server INTEGER NOT NULL DEFAULT 0",
    # The contents of files, if there is no folder for them that all servers see.
    """
    CREATE TABLE parts (
        file TEXT NOT NULL,
        number INTEGER NOT NULL,
        content BLOB NOT NULL,
        PRIMARY KEY (file, number)
    ) WITHOUT ROWID
    """,
)

# What each version of the tables adds to the one before.
VERSIONS = (_FIRST, _SHARED)

_ADD = "INSERT INTO batches (id, owner, status, created, record, server) VALUES (?, ?, ?, ?, ?, ?)"
ADD_BATCH = f"{_ADD} ON CONFLICT (id) DO NOTHING"

# A batch that is to be cancelled is only cancelled, one whose lines all have an answer is not cancelled any more, and
# nothing else is written of it by any but the server that works on it.
WRITE_BATCH = f"""
{_ADD} ON CONFLICT (id) DO UPDATE SET status = excluded.status, record = excluded.record
WHERE CASE excluded.status
    WHEN 'cancelling' THEN batches.status IN ('validating', 'in_progress', 'cancelling')
    WHEN 'cancelled' THEN batches.server = excluded.server
    ELSE batches.server = excluded.server AND batches.status <> 'cancelling'
END
"""
