"""The thought that an output begins with. Shards end it, and apply the constraint behind it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """The prompt has opened a thought, which ends where the output has one of ``closings``.

    After ``max_tokens`` tokens, if that is not None, the tokens of ``ending`` follow by force.
    """

    closings: tuple[str, ...]
    ending: tuple[int, ...] = ()
    max_tokens: int | None = None
