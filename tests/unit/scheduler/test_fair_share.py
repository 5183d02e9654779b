"""Counters of tenants."""

import pytest

from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.waiting.fair_share import FairShare

A, B, C = (Tenant(name=name) for name in "abc")


def counters(fair_share: FairShare, *tenants: Tenant) -> list[float]:
    return [fair_share.counter(tenant) for tenant in tenants]


def test_tokens_count_by_weight() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 30)
    fair_share.charge(Tenant(name="b", weight=3.0), 30)
    fair_share.charge(Tenant(name="c", weight=0.5), 30)
    assert counters(fair_share, A, B, C) == [30, 10, 60]


def test_charging_many_at_once_is_charging_one_after_another() -> None:
    third = Tenant(name="b", weight=3.0)
    together, apart = FairShare(), FairShare()
    tenants = [third, third, A, third, Tenant(name="b", weight=0.7), third, A]
    together.charge_each(tenants, 2.0)
    for tenant in tenants:
        apart.charge(tenant, 2.0)
    assert counters(together, A, B) == counters(apart, A, B)


def test_a_new_weight_applies_to_later_charges() -> None:
    fair_share = FairShare()
    fair_share.charge(Tenant(name="a", weight=1.0), 10)
    fair_share.charge(Tenant(name="a", weight=2.0), 10)
    assert fair_share.counter(A) == 15


def test_idling_earns_no_credit() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 100)
    fair_share.charge(B, 70)
    fair_share.activate(C, [A, B])
    assert fair_share.counter(C) == 70


def test_becoming_idle_and_active_again_clears_no_debt() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 10)
    fair_share.charge(B, 100)
    fair_share.activate(B, [A])
    assert counters(fair_share, A, B) == [10, 100]


def test_it_makes_no_difference_whether_the_new_tenant_is_among_the_active() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 50)
    fair_share.activate(B, [A, B])
    assert fair_share.counter(B) == 50


def test_an_active_tenant_that_was_never_charged_has_the_least_counter() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 50)
    fair_share.charge(C, 20)
    fair_share.activate(C, [A, B])
    assert counters(fair_share, A, B, C) == [50, 0, 20]


def test_without_active_tenants_all_counters_start_at_zero() -> None:
    fair_share = FairShare()
    fair_share.charge(A, 100)
    fair_share.activate(B, [])
    assert counters(fair_share, A, B) == [0, 0]


@pytest.mark.parametrize("active", [[A], []], ids=["beside another", "alone"])
def test_tenants_that_come_once_are_forgotten(active: list[Tenant]) -> None:
    fair_share = FairShare()
    for visitor in range(1000):
        tenant = Tenant(name=f"visitor {visitor}")
        fair_share.activate(tenant, active)
        fair_share.charge(tenant, 10)
        fair_share.charge(A, 1)
    assert len(fair_share) < 20
    if active:
        assert fair_share.counter(A) == 1000
