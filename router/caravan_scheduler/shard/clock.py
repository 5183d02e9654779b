"""The time that the parts of a scheduler share."""

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """The time of the events that are being handled, in seconds. One clock serves all ledgers of a scheduler."""

    now_s: float = 0.0
