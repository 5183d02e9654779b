"""Lifetimes that clients ask for: until when what is kept of a prompt does not make way for others, and who pays."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from caravan_scheduler.core.generation import Tenant

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lifetime:
    """What ``tenant`` asked for: to keep something for so many ``seconds`` after it was last used."""

    tenant: Tenant
    seconds: float


class Kept(NamedTuple):
    """Something of some ``size`` that ``tenant`` asked to keep."""

    tenant: Tenant
    size: int


def longer(first: Lifetime | None, second: Lifetime | None) -> Lifetime | None:
    """Return the longer one of two lifetimes; None if there is none."""
    if first is None or second is None:
        return first or second
    return first if first.seconds >= second.seconds else second


def within_shares(asked: Iterable[tuple[T, Kept]], most: int) -> list[T]:
    """Return what is kept of what was ``asked``, the most important first.

    All together take ``most``, and each tenant that asked for something its share of that, by weight.
    """
    listed = list(asked)
    weights = {kept.tenant.name: kept.tenant.weight for _, kept in listed}
    whole = sum(weights.values())
    taken: Counter[str] = Counter()
    found = []
    for one, (tenant, size) in listed:
        if (taken[tenant.name] + size) * whole <= most * weights[tenant.name]:
            taken[tenant.name] += size
            found.append(one)
    return found
