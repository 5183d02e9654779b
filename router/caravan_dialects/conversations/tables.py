"""The tables of the store.

Triggers count, in the transaction that changes them, the references to each node (its children, the heads that point at
it and the jobs that extend it) and to each file of a picture or a sound, and the bytes that each owner holds.
"""

from caravan_dialects.conversations.job_table import POSITIONS, SHARED
from caravan_dialects.conversations.job_table import TABLES as JOBS

_NODES = (
    """
    CREATE TABLE nodes (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        parent TEXT,
        parent_items INTEGER NOT NULL,
        items BLOB NOT NULL,
        count INTEGER NOT NULL,
        inputs INTEGER NOT NULL,
        response BLOB NOT NULL,
        -- Its tokens are the first `shared` ones of its parent and then `tokens`. No fingerprint: they are unknown.
        fingerprint TEXT NOT NULL,
        shared INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        -- Whether a client can name it: a response that was not deleted.
        named BOOLEAN NOT NULL,
        refs INTEGER NOT NULL DEFAULT 0,
        size INTEGER NOT NULL,
        used REAL NOT NULL
    )
    """,
    "CREATE INDEX unreferenced ON nodes (owner, used) WHERE refs = 0",
    "CREATE INDEX abandoned ON nodes (id) WHERE refs = 0 AND NOT named",
    """
    CREATE TABLE heads (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        node TEXT,
        items INTEGER NOT NULL,
        metadata BLOB NOT NULL,
        created REAL NOT NULL,
        size INTEGER NOT NULL,
        used REAL NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE INDEX heads_used ON heads (owner, used)",
    "CREATE TABLE usage (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID",
    """
    CREATE TRIGGER node_added AFTER INSERT ON nodes BEGIN
        UPDATE nodes SET refs = refs + 1 WHERE id = NEW.parent;
        INSERT INTO usage VALUES (NEW.owner, NEW.size) ON CONFLICT (owner) DO UPDATE SET bytes = usage.bytes + NEW.size;
    END
    """,
    """
    CREATE TRIGGER node_removed AFTER DELETE ON nodes BEGIN
        UPDATE nodes SET refs = refs - 1 WHERE id = OLD.parent;
        UPDATE usage SET bytes = bytes - OLD.size WHERE owner = OLD.owner;
    END
    """,
    """
    CREATE TRIGGER head_added AFTER INSERT ON heads BEGIN
        UPDATE nodes SET refs = refs + 1 WHERE id = NEW.node;
        INSERT INTO usage VALUES (NEW.owner, NEW.size) ON CONFLICT (owner) DO UPDATE SET bytes = usage.bytes + NEW.size;
    END
    """,
    """
    CREATE TRIGGER head_removed AFTER DELETE ON heads BEGIN
        UPDATE nodes SET refs = refs - 1 WHERE id = OLD.node;
        UPDATE usage SET bytes = bytes - OLD.size WHERE owner = OLD.owner;
    END
    """,
    """
    CREATE TRIGGER head_moved AFTER UPDATE OF node, size ON heads BEGIN
        UPDATE nodes SET refs = refs - 1 WHERE id = OLD.node;
        UPDATE nodes SET refs = refs + 1 WHERE id = NEW.node;
        UPDATE usage SET bytes = bytes + NEW.size - OLD.size WHERE owner = NEW.owner;
    END
    """,
)

_FILES = (
    """
    CREATE TABLE files (
        owner TEXT NOT NULL,
        digest BLOB NOT NULL,
        content TEXT NOT NULL,
        size INTEGER NOT NULL,
        refs INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (owner, digest)
    )
    """,
    """
    CREATE TABLE node_files (
        node TEXT NOT NULL,
        owner TEXT NOT NULL,
        digest BLOB NOT NULL,
        PRIMARY KEY (node, digest)
    ) WITHOUT ROWID
    """,
    """
    CREATE TRIGGER file_added AFTER INSERT ON files BEGIN
        INSERT INTO usage VALUES (NEW.owner, NEW.size) ON CONFLICT (owner) DO UPDATE SET bytes = usage.bytes + NEW.size;
    END
    """,
    """
    CREATE TRIGGER file_removed AFTER DELETE ON files BEGIN
        UPDATE usage SET bytes = bytes - OLD.size WHERE owner = OLD.owner;
    END
    """,
    """
    CREATE TRIGGER file_named AFTER INSERT ON node_files BEGIN
        UPDATE files SET refs = refs + 1 WHERE owner = NEW.owner AND digest = NEW.digest;
    END
    """,
    """
    CREATE TRIGGER file_named_no_more AFTER DELETE ON node_files BEGIN
        UPDATE files SET refs = refs - 1 WHERE owner = OLD.owner AND digest = OLD.digest;
        DELETE FROM files WHERE owner = OLD.owner AND digest = OLD.digest AND refs = 0;
    END
    """,
    """
    CREATE TRIGGER files_of_node_removed AFTER DELETE ON nodes BEGIN
        DELETE FROM node_files WHERE node = OLD.id;
    END
    """,
)

# The conditions of indexes as PostgreSQL wants them. Files of versions before have others.
_CONDITIONS = (
    "DROP INDEX abandoned",
    "CREATE INDEX abandoned ON nodes (id) WHERE refs = 0 AND NOT named",
)

# What each version of the tables adds to the one before.
VERSIONS = (_NODES, _FILES, JOBS, (*SHARED, *_CONDITIONS), POSITIONS)

# The nodes of a chain, the first one first, with the number of items that count of each. Responses are large, and only
# that of the last node is wanted.
CHAIN = """
WITH RECURSIVE chain (id, upto, depth) AS (
    SELECT CAST(:node AS TEXT), CAST(:items AS BIGINT), 0
    UNION ALL
    SELECT nodes.parent, nodes.parent_items, depth + 1
    FROM chain JOIN nodes ON nodes.id = chain.id WHERE nodes.parent IS NOT NULL
)
SELECT nodes.id, parent, parent_items, upto, items, inputs,
    CASE depth WHEN 0 THEN response ELSE :none END, fingerprint, shared, tokens
FROM chain JOIN nodes ON nodes.id = chain.id WHERE owner = :owner ORDER BY depth DESC
"""

# A node to which nothing refers yet.
ADD_NODE = """
INSERT INTO nodes (
    id, owner, parent, parent_items, items, count, inputs, response, fingerprint, shared, tokens, named, size, used
) VALUES (
    :id, :owner, :parent, :parent_items, :items, :count, :inputs, :response, :fingerprint, :shared, :tokens, :named,
    :size, :used
)
"""

ADD_FILE = "INSERT INTO files (owner, digest, content, size) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
NAME_FILE = "INSERT INTO node_files (node, owner, digest) VALUES (?, ?, ?)"
READ_FILE = "SELECT content FROM files WHERE owner = ? AND digest = ?"
