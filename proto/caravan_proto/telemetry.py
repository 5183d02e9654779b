"""Logging of both programs: one line per event on stderr, as text or as JSON with the same field names."""

import json
import logging
import time

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


def configure_logging(*, level: str, json_output: bool) -> None:
    """Write log records of at least ``level`` to stderr, and nowhere else."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if json_output else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
