"""The lines of a recording: JSON objects, each with one field that says what it is. The file is compressed by gzip."""

import math
from dataclasses import fields
from typing import Any

import msgspec

from caravan_scheduler.config import SchedulerConfig
from caravan_studio.recording.events import Event

# A recording of another version is refused.
VERSION = 1


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. ``at`` on the router's clock is ``unix`` in Unix time. ``tokens``: "numbered" or "real"."""

    version: int
    release: str
    at: float
    unix: float
    tokens: str


class SchedulerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler begins, with no request and no shard. Limits that are infinite are null in ``config``."""

    id: int
    model: str
    config: dict[str, Any]


class StateLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler knows as a later part of the recording begins; see `write_state`. ``keys`` have a number."""

    id: int
    keys: int
    nodes: list[list[Any]]


class Told(msgspec.Struct, frozen=True):
    """The tokens of a prefix of which earlier lines have named parts by number: ``keys`` are lengths and numbers.

    ``root``: the number of the empty prefix of its namespace.
    """

    root: int
    adapter: str
    tokens: list[int]
    keys: list[tuple[int, int]]


class CallLine(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a scheduler heard at once, and what it decided then."""

    scheduler: int
    at: float
    events: list[Event]
    actions: list[list[Any]]


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of its fields is set. ``page`` is a message of the timeline, which only a page reads."""

    caravan_recording: Header | None = None
    scheduler: SchedulerLine | None = None
    state: StateLine | None = None
    call: CallLine | None = None
    told: Told | None = None
    page: msgspec.Raw | None = None


_INFINITE_BY_NAME = frozenset(field.name for field in fields(SchedulerConfig) if field.type in (float, "float"))


def config_of(config: SchedulerConfig) -> dict[str, Any]:
    """Return a configuration as JSON can have it."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return {name: None if value == math.inf else value for name, value in plain.items()}


def read_config(plain: dict[str, Any]) -> SchedulerConfig:
    """Return a scheduler's configuration. Raises msgspec.ValidationError."""
    if unknown := plain.keys() - {field.name for field in fields(SchedulerConfig)}:
        raise msgspec.ValidationError(f"there is no {', '.join(sorted(unknown))}")
    known = {name: math.inf if value is None and name in _INFINITE_BY_NAME else value for name, value in plain.items()}
    return msgspec.convert(known, SchedulerConfig)
