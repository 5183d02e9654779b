"""Keeps weights and cells in huge pages where the system gives them only to those who ask.

A step reads all weights once. In pages of 4 KiB, the processor looks up a hundred thousand of them each time: with
400 MB in Q4_0 or Q4_K, tokens take a sixth longer. llama.cpp allocates what it repacks, and all cells, by malloc, and
glibc asks for huge pages if a variable says so when the process starts.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ON_REQUEST = "[madvise]"
_VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.hugetlb"
_KNOWN_SINCE = (2, 35)


def use_huge_pages() -> None:
    """Start this program again with the variable, unless the system needs or knows none or the user has set it.

    Call it first: what the process has done until then is lost. It keeps its number, arguments and open files.
    """
    wanted = environment_of_shard(os.environ)
    if wanted is not os.environ:
        # Without huge pages if that fails.
        with contextlib.suppress(OSError):
            os.execve(sys.executable, sys.orig_argv, wanted)  # noqa: S606


def environment_of_shard(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment that a shard started with ``environment`` has on this host."""
    return with_huge_pages(environment, _mode(), _libc()) or environment


def with_huge_pages(environment: Mapping[str, str], mode: str, libc: str) -> dict[str, str] | None:
    """Return the environment for which huge pages are used; None if ``environment`` can stay.

    ``mode``: the system's, e.g. "always [madvise] never". ``libc``: name and version, e.g. "glibc 2.36".
    """
    tunables = environment.get(_VARIABLE, "")
    if _ON_REQUEST not in mode or _TUNABLE in tunables or not _knows_tunable(libc):
        return None
    return {**environment, _VARIABLE: ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))}


def _knows_tunable(libc: str) -> bool:
    name, _, version = libc.partition(" ")
    try:
        return name == "glibc" and tuple(map(int, version.split("."))) >= _KNOWN_SINCE
    except ValueError:
        return False


def _mode() -> str:
    try:
        return _MODE.read_text()
    except OSError:
        return ""


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""
