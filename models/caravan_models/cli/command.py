"""What the commands have in common."""

import sys
from collections.abc import Callable
from pathlib import Path

from caravan_models.errors import FetchError, FetchProblem
from caravan_models.known import parse_reference
from caravan_models.reference import FORM, LocalFile, Named

NAME_HELP = f"a known name (caravan list --known), or {FORM}"
_FAILED, _INTERRUPTED = 1, 130


def run(program: str, work: Callable[[], None]) -> int:
    """Return 0 once ``work`` is done, or say in one line why not and return 1; 130 after Ctrl-C."""
    try:
        work()
    except FetchError as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        return _FAILED
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        sys.stderr.write(f"{program}: error: cannot use{where}: {error.strerror or error}\n")
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def named(text: str) -> Named:
    """Return what ``text`` names. Raises FetchError for a file, since only names are in the cache."""
    reference = parse_reference(text)
    if isinstance(reference, LocalFile):
        raise FetchError(FetchProblem.BAD_REFERENCE, f"{Path(text)} is a file, not the name of a model; pass {FORM}")
    return reference
