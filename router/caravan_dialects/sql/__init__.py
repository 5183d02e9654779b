"""The database beneath the stores: SQLite in a file or in memory, or PostgreSQL, which several routers share.

Tables and statements are written once, in the part of SQL that both understand, with SQLite's placeholders, types and
triggers. `postgres` translates these.
"""
