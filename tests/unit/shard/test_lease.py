"""Leases: taking, renewing, expiry and fencing."""

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.model import ShardClaim
from caravan_shard.protocol.results import Refusal
from caravan_shard.service.lease import EXPIRED, OVERTAKEN, RELEASED, ShardLease


class Lease(ShardLease):
    """A lease with a clock to set, ``now``, and what it has ``released`` every sequence for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.released: list[Refusal] = []
        super().__init__(self.released.append, lambda: self.now)

    def at(self, now: float) -> "Lease":
        self.now = now
        return self


def error_of(refusal: Refusal | None) -> ShardError | None:
    return None if refusal is None else refusal.error


def test_commands_before_the_first_lease_are_refused() -> None:
    lease = Lease()
    assert error_of(lease.check(0)) is ShardError.NOT_LEASED
    assert lease.epoch == 0
    assert not lease.is_held


def test_a_higher_epoch_takes_over_and_fences_the_older() -> None:
    lease = Lease()
    assert lease.request("a", 3, 10.0) is None
    assert lease.check(3) is None
    assert lease.at(1.0).request("b", 4, 10.0) is None
    assert lease.released == [OVERTAKEN, OVERTAKEN]
    assert error_of(lease.check(3)) is ShardError.STALE_EPOCH
    assert error_of(lease.request("a", 3, 10.0)) is ShardError.STALE_EPOCH
    assert error_of(lease.check(5)) is ShardError.STALE_EPOCH
    assert lease.check(4) is None


def test_only_the_holder_renews_its_epoch() -> None:
    lease = Lease()
    lease.request("a", 3, 1.0)
    assert lease.at(0.9).request("a", 3, 1.0) is None
    assert lease.released == [OVERTAKEN], "a renewed lease keeps its sequences"
    assert error_of(lease.request("b", 3, 1.0)) is ShardError.STALE_EPOCH
    assert lease.at(1.8).is_held


def test_the_url_is_that_of_the_holder_while_it_holds() -> None:
    lease = Lease()
    assert lease.holder_url == ""
    lease.request("a", 1, 1.0, "http://a")
    assert lease.holder_url == "http://a"
    lease.at(0.5).request("b", 2, 1.0)
    assert lease.holder_url == ""
    lease.at(0.6).request("a", 3, 1.0, "http://a")
    assert lease.at(1.6).holder_url == ""


def test_an_expired_lease_cannot_be_renewed() -> None:
    lease = Lease()
    lease.request("a", 3, 1.0)
    assert lease.at(0.99).is_held
    assert not lease.at(1.0).is_held
    lease.at(1.1).expire()
    assert lease.released == [OVERTAKEN, EXPIRED]
    assert error_of(lease.check(3)) is ShardError.NOT_LEASED
    assert error_of(lease.at(1.2).request("a", 3, 1.0)) is ShardError.STALE_EPOCH
    assert lease.request("a", 4, 1.0) is None


@pytest.mark.parametrize(("router_id", "ttl_s"), [("", 1.0), ("x" * 257, 1.0), ("a", 0.0)])
def test_a_malformed_request_takes_nothing(router_id: str, ttl_s: float) -> None:
    lease = Lease()
    assert error_of(lease.request(router_id, 1, ttl_s)) is ShardError.BAD_REQUEST
    assert (lease.epoch, lease.released) == (0, [])


def test_epoch_zero_is_never_granted() -> None:
    assert error_of(Lease().request("a", 0, 1.0)) is ShardError.STALE_EPOCH


def test_a_router_that_asks_for_a_held_shard_waits_and_is_heard() -> None:
    lease = Lease()
    assert lease.ask("b", ShardClaim(0)) is None
    lease.request("a", 1, 10.0)
    assert lease.at(1.0).ask("a", ShardClaim(3)) is None
    assert lease.claim is None
    assert error_of(lease.ask("b", ShardClaim(2))) is ShardError.HELD
    assert lease.at(3.4).claim == ShardClaim(2)
    assert lease.at(3.6).claim is None
    assert error_of(lease.at(7.0).ask("b", ShardClaim(4))) is ShardError.HELD
    assert lease.release("a", 1) is None
    assert lease.released[-1] == RELEASED
    assert lease.at(7.5).ask("b", ShardClaim(4)) is None
    assert lease.request("b", 2, 10.0) is None
    assert lease.at(7.6).claim is None


def test_an_urgent_claim_is_not_replaced_by_another() -> None:
    lease = Lease()
    lease.request("a", 1, 10.0)
    for router_id, claim, now in (
        ("b", ShardClaim(2), 1.0),
        ("c", ShardClaim(1, urgent=True), 1.5),
        ("b", ShardClaim(2), 2),
    ):
        assert error_of(lease.at(now).ask(router_id, claim)) is ShardError.HELD
    assert lease.at(2.1).claim == ShardClaim(1, urgent=True)
    lease.at(4.1).ask("b", ShardClaim(2))
    assert lease.claim == ShardClaim(2)


def test_a_lease_ends_soon_after_the_connection_broke_unless_it_is_renewed() -> None:
    lease = Lease()
    lease.request("a", 1, 15.0)
    lease.at(1.0).note_broken(0)
    assert lease.at(3.1).is_held
    lease.at(4.0).note_broken(1)
    assert lease.at(5.9).is_held
    assert not lease.at(6.1).is_held
    lease.at(7.0).request("a", 2, 15.0)
    lease.at(8.0).note_broken(2)
    assert lease.at(9.0).request("a", 2, 15.0) is None
    assert lease.at(20.0).is_held
