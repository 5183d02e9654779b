"""Why a shard does not start. The programs that start shards import this, which needs no other package."""


class StartupError(Exception):
    """The shard cannot start as configured; the message says what to do."""
