"""Ollama's ``keep_alive``: how long a model stays loaded after a request."""

import math
import re

from caravan_dialects.api.ollama.rules import keep_alive_error

_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(keep_alive: str | float | None) -> float | None:
    """Return seconds, infinity for a negative value; None if nothing is said. Raises ValidationError.

    A number is in seconds; a text is a duration of Go such as "5m" or "1h30m", or a number.
    Source: Ollama's docs/api.md, and ``api.Duration`` in its api/types.go.
    """
    if keep_alive is None or keep_alive == "":
        return None
    seconds = keep_alive if isinstance(keep_alive, float | int) else _parse(keep_alive)
    if seconds is None or math.isnan(seconds):
        raise keep_alive_error(keep_alive)
    return math.inf if seconds < 0 else seconds


def _parse(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    unsigned = text.removeprefix("-")
    parts = _PART.findall(unsigned)
    if not parts or "".join(number + unit for number, unit in parts) != unsigned:
        return None
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return -seconds if text.startswith("-") else seconds
