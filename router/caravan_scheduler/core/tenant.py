"""The tenant on whose behalf a request runs. Requests of one tenant share that tenant's part of the tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """While several tenants wait, each gets tokens in proportion to its ``weight`` > 0."""

    name: str
    weight: float = 1.0


ANYONE = Tenant(name="")
