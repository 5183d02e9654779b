"""Logging of both programs: one line per event on stderr, as text or as JSON with the same field names."""

import json
import logging
import time
from dataclasses import dataclass
from logging.handlers import WatchedFileHandler

# The attributes of every record. Other attributes come from `extra` and become fields of the line.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{self.formatTime(record)} {record.levelname:<7} {record.name}: {record.getMessage()}{extra}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


ACCESS_LOG = "caravan.access"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """``level``: the least one to log. ``file``: appended to; None for stderr. ``access``: with a line a request."""

    level: str
    json_output: bool = False
    file: str | None = None
    access: bool = True


def configure_logging(settings: LogSettings) -> None:
    """Write log records to stderr or a file, and nowhere else. Raises LogFileError."""
    try:
        # It opens the file again once it was moved away.
        handler = logging.StreamHandler() if settings.file is None else WatchedFileHandler(settings.file)
    except OSError as error:
        raise LogFileError(f"--log-file: cannot write {settings.file}: {error.strerror}") from error
    handler.setFormatter(_JsonFormatter() if settings.json_output else _TextFormatter())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    logging.getLogger(ACCESS_LOG).disabled = not settings.access


class LogFileError(Exception):
    """The file of the log cannot be written."""
