"""Reads a chat template that an operator gives in place of the one in a model's file."""

from pathlib import Path

from caravan_shard.backends.base import StartupError

# What routers render at most.
_MAX_BYTES = 256 << 10


def template_in(path: Path) -> str:
    """Return the template in the file ``path``. Raises StartupError."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise StartupError(f"--chat-template-file {path} must have at most {_MAX_BYTES} bytes. Given: {size}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template-file {path} cannot be read: {error}") from error
    if not text.strip():
        raise StartupError(f"--chat-template-file {path} is empty")
    return text
