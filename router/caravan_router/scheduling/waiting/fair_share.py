"""Fair share between tenants by virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588: who was charged least goes next.
"""

from collections.abc import Iterable

from caravan_router.core.tenant import Tenant


class FairShare:
    """How many tokens each tenant was served, divided by its weight: its counter.

    A tenant is active while a request of it waits or runs. Only differences between active ones mean anything. Tenants
    are told apart by name; the weight that counts is the one of the moment.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}

    def __len__(self) -> int:
        """Tenants remembered."""
        return len(self._counters)

    def counter(self, tenant: Tenant) -> float:
        """Weighted tokens; the tenant with the least goes first."""
        return self._counters.get(tenant.name, 0.0)

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """Count ``tokens`` that were computed for it."""
        counters, name = self._counters, tenant.name
        counters[name] = counters.get(name, 0.0) + tokens / tenant.weight

    def activate(self, tenant: Tenant, active: Iterable[Tenant]) -> None:
        """Let in a tenant that had nothing waiting or running: its idle time earned it no credit.

        ``active``: those that have; whether ``tenant`` is among them makes no difference. If nobody has, nobody is owed
        anything, and all start anew.
        """
        rivals = {rival.name for rival in active} - {tenant.name}
        if not rivals:
            self._counters = {tenant.name: 0.0}
            return
        least = min(self._counters.get(name, 0.0) for name in rivals)
        own = max(self.counter(tenant), least)
        # An idle tenant at or below the least active one would be lifted to it when it comes back, as an unknown one.
        self._counters = {
            name: counter for name, counter in self._counters.items() if counter > least or name in rivals
        }
        self._counters[tenant.name] = own
