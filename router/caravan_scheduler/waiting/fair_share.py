"""Fair share by virtual token counters: who was charged least goes next. Tenants share, and the sessions of a tenant.

Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588.
"""

import heapq
import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.sequence import Account, Sequence

# What a token costs a tenant, as in the paper: an output token takes a step of its own.
PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0
# Clients choose the names of sessions, so there is no end of them. Of idle ones, those that were charged most are kept.
MOST_IDLE_SESSIONS = 64
# So many accounts are not worth looking for idle ones.
_FEW = 16
_NOTHING = Account()


class FairShare:
    """An account for each that shares, by name.

    One is active while one of its requests waits or runs. Only differences between the accounts of active ones have a
    meaning. A tenant's tokens are divided by its weight at the time they are charged. Of others, hardly more than
    ``most_idle`` accounts are kept.
    """

    def __init__(self, most_idle: int | None = None) -> None:
        self._accounts: dict[str, Account] = {}
        self._most_idle = most_idle

    def __len__(self) -> int:
        """Return the number of accounts."""
        return len(self._accounts)

    def account(self, name: str) -> Account:
        """Return the account of ``name``, which stays the same while it is active."""
        if (account := self._accounts.get(name)) is None:
            account = self._accounts[name] = Account()
        return account

    def counter(self, tenant: Tenant) -> float:
        """Return the weighted tokens of ``tenant``; the tenant with the fewest goes first."""
        return self.charged(tenant.name)

    def charged(self, name: str) -> float:
        """Return the weighted tokens of ``name``."""
        return self._accounts.get(name, _NOTHING).counter

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """Count ``tokens`` that were computed for ``tenant``."""
        self.charge_each([tenant], tokens)

    def charge_each(self, tenants: Iterable[Tenant], tokens: float) -> None:
        """Count ``tokens`` for each of ``tenants``, where the same one may come again."""
        for tenant, times in itertools.groupby(tenants):
            account, share = self.account(tenant.name), tokens / tenant.weight
            for _ in times:  # a product may round otherwise than a sum
                account.counter += share

    def activate(self, name: str, active: Collection[str]) -> None:
        """Make ``name`` active, without credit for the time in which it was idle.

        ``active``: those that are active; whether ``name`` is among them makes no difference. If there is none, nobody
        is owed anything and all accounts start at 0.
        """
        own = self.account(name)
        accounts = self._accounts
        rivals = [accounts.get(other, _NOTHING).counter for other in active if other != name]
        if not rivals:
            own.counter = 0.0
            self._accounts = {name: own}
            return
        least = min(rivals)
        own.counter = max(own.counter, least)
        if len(accounts) > 2 * len(rivals) + _FEW:
            self._forget_idle({*active, name}, least)

    def _forget_idle(self, active: Collection[str], least: float) -> None:
        """Forget idle accounts at or below the ``least`` active one: coming back lifts them to it, as unknown ones.

        Of others, those that were charged most stay: forgetting them would cost the active ones most.
        """
        idle = [other for other, one in self._accounts.items() if one.counter > least and other not in active]
        if self._most_idle is not None:
            idle = heapq.nlargest(self._most_idle, idle, key=self.charged)
        self._accounts = {name: one for name in (*active, *idle) if (one := self._accounts.get(name)) is not None}


@dataclass(slots=True, eq=False)
class _ActiveTenant:
    """The sessions of a tenant that has requests. ``requests``: how many each of its active sessions has."""

    sessions: FairShare = field(default_factory=lambda: FairShare(MOST_IDLE_SESSIONS))
    requests: dict[str, int] = field(default_factory=dict)


class Shares:
    """Fair share between tenants, and between the sessions of each.

    A session is charged like a tenant of weight 1. What it does moves shares within its tenant only. Sessions are
    forgotten with the last request of their tenant.
    """

    def __init__(self) -> None:
        self.tenants = FairShare()
        # Those that have requests, by name.
        self._active: dict[str, _ActiveTenant] = {}

    def sessions_of(self, tenant: str) -> FairShare:
        """Return the shares of the sessions of ``tenant``, which is active."""
        return self._active[tenant].sessions

    def enter(self, tenant: str, session: str) -> Account:
        """Count a request that has come. Return the account of its session, to which its tokens are charged."""
        one = self._active.get(tenant)
        if one is None:
            self.tenants.activate(tenant, self._active)
            one = self._active[tenant] = _ActiveTenant()
        if session not in one.requests:
            one.sessions.activate(session, one.requests)
        one.requests[session] = one.requests.get(session, 0) + 1
        return one.sessions.account(session)

    def charged(self, tenant: str, session: str) -> float:
        """Return what a session was charged; 0 if it is not known."""
        one = self._active.get(tenant)
        return 0.0 if one is None else one.sessions.charged(session)

    def charge(self, tenant: Tenant, session: str, tokens: float) -> None:
        """Charge ``tokens`` to a ``tenant``, and to a session of it if it has requests."""
        self.tenants.charge(tenant, tokens)
        if (one := self._active.get(tenant.name)) is not None:
            one.sessions.account(session).counter += tokens

    def charge_each(self, sequences: Collection[Sequence], tokens: float) -> None:
        """Charge ``tokens`` for each of ``sequences`` to its tenant and to its session. This runs for every token."""
        self.tenants.charge_each([sequence.spec.tenant for sequence in sequences], tokens)
        for sequence in sequences:
            sequence.account.counter += tokens

    def leave(self, tenant: str, session: str) -> None:
        """Count a request as ended."""
        one = self._active[tenant]
        count = one.requests.pop(session) - 1
        if count:
            one.requests[session] = count
        elif not one.requests:
            del self._active[tenant]
