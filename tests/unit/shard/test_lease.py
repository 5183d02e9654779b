"""Leases: taking, renewing, expiry and fencing."""

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.model import ShardClaim
from caravan_shard.protocol.results import Refusal
from caravan_shard.service.lease import LeaseBook, LeaseChange


def refusal_of(answer: object) -> ShardError | None:
    return answer.error if isinstance(answer, Refusal) else None


def test_commands_before_the_first_lease_are_refused() -> None:
    book = LeaseBook()
    assert refusal_of(book.check(0)) is ShardError.NOT_LEASED
    assert book.epoch == 0


def test_a_higher_epoch_takes_over_and_fences_the_older() -> None:
    book = LeaseBook()
    assert book.request("a", 3, 10.0, now=0.0) is LeaseChange.TAKEN
    assert book.check(3) is None
    assert book.request("b", 4, 10.0, now=1.0) is LeaseChange.TAKEN
    assert refusal_of(book.check(3)) is ShardError.STALE_EPOCH
    assert refusal_of(book.request("a", 3, 10.0, now=1.0)) is ShardError.STALE_EPOCH
    assert refusal_of(book.check(5)) is ShardError.STALE_EPOCH
    assert book.check(4) is None


def test_only_the_holder_renews_its_epoch() -> None:
    book = LeaseBook()
    book.request("a", 3, 1.0, now=0.0)
    assert book.request("a", 3, 1.0, now=0.9) is LeaseChange.RENEWED
    assert refusal_of(book.request("b", 3, 1.0, now=0.9)) is ShardError.STALE_EPOCH
    assert not book.expire(now=1.8)


def test_the_url_is_that_of_the_holder_while_it_holds() -> None:
    book = LeaseBook()
    assert book.holder_url == ""
    book.request("a", 1, 1.0, now=0.0, url="http://a")
    assert book.holder_url == "http://a"
    book.request("b", 2, 1.0, now=0.5)
    assert book.holder_url == ""
    book.request("a", 3, 1.0, now=0.6, url="http://a")
    assert book.expire(now=1.6)
    assert book.holder_url == ""


def test_an_expired_lease_cannot_be_renewed() -> None:
    book = LeaseBook()
    book.request("a", 3, 1.0, now=0.0)
    assert not book.expire(now=0.99)
    assert book.expire(now=1.0)
    assert not book.expire(now=1.1)
    assert refusal_of(book.check(3)) is ShardError.NOT_LEASED
    assert refusal_of(book.request("a", 3, 1.0, now=1.2)) is ShardError.STALE_EPOCH
    assert book.request("a", 4, 1.0, now=1.2) is LeaseChange.TAKEN


@pytest.mark.parametrize(("router_id", "ttl_s"), [("", 1.0), ("x" * 257, 1.0), ("a", 0.0)])
def test_a_malformed_request_takes_nothing(router_id: str, ttl_s: float) -> None:
    book = LeaseBook()
    assert refusal_of(book.request(router_id, 1, ttl_s, now=0.0)) is ShardError.BAD_REQUEST
    assert book.epoch == 0


def test_epoch_zero_is_never_granted() -> None:
    assert refusal_of(LeaseBook().request("a", 0, 1.0, now=0.0)) is ShardError.STALE_EPOCH


def test_a_router_that_asks_for_a_held_shard_waits_and_is_heard() -> None:
    book = LeaseBook()
    assert book.ask("b", ShardClaim(0), now=0.0) is None
    assert book.request("a", 1, 10.0, now=0.0) is LeaseChange.TAKEN
    assert book.ask("a", ShardClaim(3), now=1.0) is None
    assert book.claim(now=1.0) is None
    assert refusal_of(book.ask("b", ShardClaim(2), now=1.0)) is ShardError.HELD
    assert book.claim(now=3.4) == ShardClaim(2)
    assert book.claim(now=3.6) is None
    assert refusal_of(book.ask("b", ShardClaim(4), now=7.0)) is ShardError.HELD
    assert book.release("a", 1) is None
    assert book.ask("b", ShardClaim(4), now=7.5) is None
    assert book.request("b", 2, 10.0, now=7.5) is LeaseChange.TAKEN
    assert book.claim(now=7.6) is None


def test_an_urgent_claim_is_not_replaced_by_another() -> None:
    book = LeaseBook()
    book.request("a", 1, 10.0, now=0.0)
    for router_id, claim, now in (
        ("b", ShardClaim(2), 1.0),
        ("c", ShardClaim(1, urgent=True), 1.5),
        ("b", ShardClaim(2), 2),
    ):
        assert refusal_of(book.ask(router_id, claim, now)) is ShardError.HELD
    assert book.claim(now=2.1) == ShardClaim(1, urgent=True)
    book.ask("b", ShardClaim(2), now=4.1)
    assert book.claim(now=4.1) == ShardClaim(2)


def test_a_lease_ends_soon_after_the_connection_broke_unless_it_is_renewed() -> None:
    book = LeaseBook()
    book.request("a", 1, 15.0, now=0.0)
    book.note_broken(0, now=1.0)
    assert not book.expire(now=3.1)
    book.note_broken(1, now=4.0)
    assert not book.expire(now=5.9)
    assert book.expire(now=6.1)
    book.request("a", 2, 15.0, now=7.0)
    book.note_broken(2, now=8.0)
    assert book.request("a", 2, 15.0, now=9.0) is LeaseChange.RENEWED
    assert not book.expire(now=20.0)
