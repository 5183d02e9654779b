"""Ids that nobody can guess: 128 random bits after a prefix that says what they name."""

import secrets


def new_id(prefix: str) -> str:
    """Return an id such as ``resp_9f86d081884c7d659a2feaa0c55ad015``."""
    return f"{prefix}_{secrets.token_hex(16)}"
