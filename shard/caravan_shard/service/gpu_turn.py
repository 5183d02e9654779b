"""Lets one shard of a host after another take memory of GPUs, so that each sees what the others have left."""

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def gpu_turn(folder: Path | None = None) -> Iterator[None]:
    """Wait until no other shard of this user is loading, and let none load meanwhile.

    It ends with the process, however that ends. ``folder``: where the lock is, by default that of temporary files. A
    host without room for it has no turns.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"caravan-gpus-{os.getuid()}.lock"
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _log.warning("shards that start together may see the same memory as free: %s", error)
        yield
        return
    try:
        _lock(lock)
        yield
    finally:
        os.close(lock)


def _lock(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("waiting for another shard to load")
        fcntl.flock(lock, fcntl.LOCK_EX)
