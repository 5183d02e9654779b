"""Transfers under way, and what they are expected to take."""

import pytest

from caravan_scheduler.events import SavedRun
from caravan_scheduler.transfers import Transfers


def run(size_bytes: int) -> SavedRun:
    return SavedRun(start=0, cuts=((16, bytes(16)),), size_bytes=size_bytes)


def test_a_transfer_waits_for_those_to_the_same_shard() -> None:
    transfers = Transfers()
    alone_s = transfers.seconds("b", 30_000_000)
    assert alone_s == pytest.approx(0.11)
    transfers.begin("a", "b", [run(30_000_000), run(30_000_000)])
    assert transfers.seconds("b", 30_000_000) == pytest.approx(0.31)
    assert transfers.seconds("c", 30_000_000) == alone_s


def test_calls_and_bytes_are_learnt_apart() -> None:
    transfers = Transfers()
    for _ in range(30):
        transfers.end(transfers.begin("a", "b", [run(1_000)]).transfer_id, seconds=0.1)
    assert transfers.seconds("b", 1_000) == pytest.approx(0.1, rel=0.01)
    for _ in range(30):
        transfers.end(transfers.begin("a", "b", [run(10_000_000)]).transfer_id, seconds=1.1)
    assert transfers.seconds("b", 20_000_000) == pytest.approx(2.1, rel=0.01)
    assert transfers.bytes_within(2.1) == pytest.approx(20_000_000, rel=0.01)
    assert transfers.bytes_within(0.05) == 0


def test_a_failure_teaches_nothing_and_ends_the_wait() -> None:
    transfers = Transfers()
    begun = transfers.begin("a", "b", [run(1_000)], request_id=7)
    assert transfers.is_awaited_by(7)
    assert transfers.involve("a")
    assert transfers.involve("b")
    before = transfers.seconds("c", 1_000)
    assert transfers.end(begun.transfer_id) is begun
    assert transfers.end(begun.transfer_id) is None
    assert transfers.seconds("c", 1_000) == before
    assert not transfers.is_awaited_by(7)
    assert not transfers.involve("a")


def test_a_lost_shard_ends_its_transfers_and_a_flush_spoils_them() -> None:
    transfers = Transfers()
    first = transfers.begin("a", "b", [run(1)], request_id=1)
    second = transfers.begin("b", "c", [run(1)], request_id=2)
    third = transfers.begin("c", "d", [run(1)], request_id=3)
    transfers.note_flush("d", None)
    transfers.note_flush("b", b"a key")
    unwanted = [set(transfers.unwanted_keys(one.transfer_id)) for one in (first, second, third)]
    assert unwanted == [{b"a key"}, set(), {run(1).key}]
    assert list(transfers.lose("b")) == [first, second]
    assert transfers.is_awaited_by(3)
    assert not transfers.is_awaited_by(1)
    assert transfers.end(third.transfer_id) is third
    assert not transfers.unwanted_keys(third.transfer_id)
