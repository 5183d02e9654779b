"""Keeps what a start found out about equal logits, so that the next start with the same flags need not compare them."""

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import llama_cpp

from caravan_shard.backends.llama.numerics import Equality

_log = logging.getLogger(__name__)


def known_equality(cache_dir: str, inputs: str, measure: Callable[[], Equality]) -> Equality:
    """Return what a file of ``cache_dir`` says for ``inputs``, or what ``measure`` finds, which is written there.

    ``inputs``: a digest, in hexadecimal, of all that decides how a shard computes: model, flags, build, and features of
    the CPU. Without a folder, and with a file that cannot be read, it is measured. A folder may be shared by processes.
    """
    if not cache_dir:
        return measure()
    path = Path(cache_dir) / f"equality-{inputs[:32]}.json"
    known = _read(path, inputs)
    if known is not None:
        return known
    found = measure()
    _write(path, {"inputs": inputs, **dataclasses.asdict(found)})
    return found


def library_files() -> list[tuple[str, int, int]]:
    """Return name, bytes and time of each library of llama.cpp: another build of a version may have other kernels."""
    found = []
    for path in sorted((Path(llama_cpp.__file__).parent / "lib").glob("*.so*")):
        status = path.stat()
        found.append((path.name, status.st_size, status.st_mtime_ns))
    return found


def _read(path: Path, inputs: str) -> Equality | None:
    try:
        match json.loads(path.read_bytes()):
            case {
                "inputs": str() as written,
                "company": bool() | None as company,
                "chunk": bool() | None as chunk,
                "logits": str() as logits,
            } if written == inputs:
                return Equality(company, chunk, logits)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("a file of --cache-dir cannot be read", extra={"path": str(path), "error": str(error)})
    return None


def _write(path: Path, content: dict[str, object]) -> None:
    """Write a file that others see only once it is complete. A shard starts without it as well."""
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_text(json.dumps(content))
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("cannot write a file of --cache-dir", extra={"path": str(path), "error": str(error)})
