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

# What each version of the tables adds to the one before.
VERSIONS = (_FIRST,)
