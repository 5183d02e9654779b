"""Sends llama.cpp's own log lines to the logger ``llama.cpp``."""

import logging
import threading
from typing import Any

import llama_cpp

_log = logging.getLogger("llama.cpp")

# llama.cpp also warns of normal events such as a full cache, so warnings become debug lines.
_LEVELS = {3: logging.DEBUG, 4: logging.ERROR}
_REASON = "error loading model: "

# Why the model could not be loaded that is being loaded, on each thread that loads one.
_loading = threading.local()


def _forward(level: int, text: bytes, _user_data: Any) -> None:
    line = text.decode(errors="replace").rstrip()
    if line:
        _log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)
        if _REASON in line:
            _loading.reason = line.partition(_REASON)[2]


# llama.cpp keeps the pointer for as long as the process lives.
log_callback = llama_cpp.llama_log_callback(_forward)


def route_llama_log() -> None:
    """Send llama.cpp's log lines through `logging` from now on: errors as errors, all others as debug lines."""
    llama_cpp.llama_log_set(log_callback, None)


def take_reason() -> str:
    """Return why this thread could not load a model, as llama.cpp has said since the last call; "" if it has not."""
    reason: str = getattr(_loading, "reason", "")
    _loading.reason = ""
    return reason
