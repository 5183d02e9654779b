"""Short texts of objects for people at a prompt: what was set, and long values cut."""

import dataclasses
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_shortened = reprlib.Repr()
_shortened.maxstring, _shortened.maxother = 80, 320


def short_repr(instance: Any) -> str:
    """Return the text of a dataclass: the fields that differ from their defaults, long ones cut."""
    values = {
        field.name: value
        for field in dataclasses.fields(instance)
        if field.repr and (value := getattr(instance, field.name)) is not field.default and value != field.default
    }
    return _call(type(instance).__name__, values)


def model_repr(kind: str, model: str | Path, options: Mapping[str, Any], *, closed: bool) -> str:
    """Return the text of a model of the class ``kind`` that was opened with ``options``."""
    shown = _call(kind, options, repr(str(model)))
    return f"<closed {shown}>" if closed else shown


def _call(name: str, values: Mapping[str, Any], *first: str) -> str:
    return f"{name}({', '.join([*first, *(f'{key}={_shortened.repr(value)}' for key, value in values.items())])})"
