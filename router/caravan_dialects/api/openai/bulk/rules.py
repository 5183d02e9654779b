"""Rules of files and batches, and the readers of their parameters."""

import re
from collections.abc import Mapping, Sequence

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.generation.rules import shown, unsupported_field_error
from caravan_dialects.api.paging import is_newest_first, page_size
from caravan_dialects.bulk.store import Page

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
MAX_PAGE = 10_000
MIN_LIFE_S, MAX_LIFE_S = 3_600, 30 * 24 * 3_600
MAX_WINDOW_H = 7 * 24
_WINDOW = re.compile(r"([0-9]{1,3})h")
_MOST_METADATA, _MOST_KEY_CHARACTERS, _MOST_VALUE_CHARACTERS = 16, 64, 512


def purpose_error(given: str) -> ValidationError:
    return unsupported_field_error("purpose", f"use one of {', '.join(PURPOSES)}", given)


def endpoint_error(known: Sequence[str], given: str) -> ValidationError:
    return unsupported_field_error("endpoint", f"use one of {', '.join(known)}", given)


def window_error(given: str) -> ValidationError:
    message = f"`completion_window` must be hours from 1h to {MAX_WINDOW_H}h, such as 24h. Given: {shown(given)}"
    return ValidationError("completion_window", message)


def window_hours(text: str) -> int:
    """Return the hours of a ``completion_window``. Raises ValidationError."""
    found = _WINDOW.fullmatch(text)
    hours = int(found[1]) if found is not None else 0
    if not 1 <= hours <= MAX_WINDOW_H:
        raise window_error(text)
    return hours


def check_life(field: str, anchor: str, seconds: int) -> None:
    """Check when a file expires. Raises ValidationError."""
    if anchor != "created_at":
        raise unsupported_field_error(f"{field}.anchor", "use `created_at`", anchor)
    check_range(f"{field}.seconds", seconds, MIN_LIFE_S, MAX_LIFE_S)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raises ValidationError."""
    given = metadata or {}
    check_range("metadata", len(given), 0, _MOST_METADATA)
    for key, value in given.items():
        check_range("metadata: characters of a key", len(key), 1, _MOST_KEY_CHARACTERS)
        check_range(f"metadata.{key}: characters", len(value), 0, _MOST_VALUE_CHARACTERS)


def page_of_query(query: Mapping[str, str], default: int, most: int) -> Page:
    """Return the page that a query asks for. Raises ValidationError."""
    newest_first = is_newest_first(query)
    return Page(limit=page_size(query, default, most), after=query.get("after"), newest_first=newest_first)
