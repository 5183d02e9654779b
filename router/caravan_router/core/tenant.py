"""On whose behalf a request runs: those who share one share their fair part of the tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """``weight`` > 0: its part of the tokens is proportional to it while others wait too."""

    name: str
    weight: float = 1.0


ANYONE = Tenant(name="")
