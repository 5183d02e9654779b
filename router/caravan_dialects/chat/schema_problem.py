"""What is wrong with a client's schema, and where."""

from collections.abc import Sequence

Path = tuple[str | int, ...]

_MOST_LETTERS = 200


class UnsupportedSchemaError(Exception):
    """The schema cannot be enforced. ``path``: the place within the schema; empty for the whole."""

    def __init__(self, reason: str, path: Sequence[str | int] = ()) -> None:
        self.reason = reason
        self.path = path_text(path)
        super().__init__(f"`{self.path}`: {reason}" if path else reason)


class UnsupportedToolError(Exception):
    """The schema of a function's parameters cannot be enforced. ``name``: of the function."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(reason)


def path_text(path: Sequence[str | int]) -> str:
    """Return ``path`` as it is written in errors, such as ``properties.size.enum[2]``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    text = "".join(steps).removeprefix(".")
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."
