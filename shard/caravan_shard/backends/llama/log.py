"""Sends llama.cpp's own log lines to the logger ``llama.cpp``."""

import logging
from typing import Any

import llama_cpp

_log = logging.getLogger("llama.cpp")

# llama.cpp also warns of normal events such as a full cache, so warnings become debug lines.
_LEVELS = {3: logging.DEBUG, 4: logging.ERROR}


def _forward(level: int, text: bytes, _user_data: Any) -> None:
    line = text.decode(errors="replace").rstrip()
    if line:
        _log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


# llama.cpp keeps the pointer for as long as the process lives.
log_callback = llama_cpp.llama_log_callback(_forward)


def route_llama_log() -> None:
    """Send llama.cpp's log lines through `logging` from now on: errors as errors, all others as debug lines."""
    llama_cpp.llama_log_set(log_callback, None)
