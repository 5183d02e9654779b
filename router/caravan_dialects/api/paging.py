"""Reads the parameters of lists: how many entries a page has, and in which order."""

from collections.abc import Mapping

from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.generation.rules import unsupported_field_error


def page_size(query: Mapping[str, str], default: int, most: int) -> int:
    """Return the ``limit`` of a query. Raises ValidationError."""
    given = query.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise unsupported_field_error("limit", f"use 1 to {most}", given)
    check_range("limit", int(given), 1, most)
    return int(given)


def is_newest_first(query: Mapping[str, str]) -> bool:
    """Return whether the ``order`` of a query is `desc`, the default. Raises ValidationError."""
    order = query.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise unsupported_field_error("order", "use `asc` or `desc`", order)
    return order == "desc"
