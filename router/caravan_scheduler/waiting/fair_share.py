"""Fair share between tenants by virtual token counters: the tenant that was charged least goes next.

Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588.
"""

import itertools
from collections.abc import Iterable

from caravan_scheduler.core.generation import Tenant

# What a token costs a tenant, as in the paper: an output token takes a step of its own.
PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0


class FairShare:
    """A counter for each tenant: tokens computed for it, divided by its weight.

    A tenant is active while one of its requests waits or runs. Only differences between the counters of active tenants
    have a meaning. Tenants are identified by name; tokens are divided by the weight at the time they are charged.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}

    def __len__(self) -> int:
        """Return the number of counters."""
        return len(self._counters)

    def counter(self, tenant: Tenant) -> float:
        """Return the weighted tokens of ``tenant``; the tenant with the fewest goes first."""
        return self._counters.get(tenant.name, 0.0)

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """Count ``tokens`` that were computed for ``tenant``."""
        self.charge_each([tenant], tokens)

    def charge_each(self, tenants: Iterable[Tenant], tokens: float) -> None:
        """Count ``tokens`` for each of ``tenants``, where the same one may come again."""
        for tenant, times in itertools.groupby(tenants):
            counter, share = self._counters.get(tenant.name, 0.0), tokens / tenant.weight
            for _ in times:  # a product may round otherwise than a sum
                counter += share
            self._counters[tenant.name] = counter

    def activate(self, tenant: Tenant, active: Iterable[Tenant]) -> None:
        """Make ``tenant`` active, without credit for the time in which it was idle.

        ``active``: the tenants that are active; whether ``tenant`` is among them makes no difference. If there is none,
        nobody is owed anything and all counters start at 0.
        """
        rivals = {rival.name for rival in active} - {tenant.name}
        if not rivals:
            self._counters = {tenant.name: 0.0}
            return
        least = min(self._counters.get(name, 0.0) for name in rivals)
        own = max(self.counter(tenant), least)
        # Idle tenants at or below the least active one are forgotten: coming back lifts them to it, as unknown ones.
        self._counters = {
            name: counter for name, counter in self._counters.items() if counter > least or name in rivals
        }
        self._counters[tenant.name] = own
