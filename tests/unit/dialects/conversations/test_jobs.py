"""Jobs in the store: their steps, their end with a turn, their bytes and their lives."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from caravan_dialects.api.openai.responses.event_log import EventLog
from caravan_dialects.conversations import job_table
from caravan_dialects.conversations.database import Bounds, Database
from caravan_dialects.conversations.nodes import Added, Job, JobEnd, Node, Position, Step, Transaction
from caravan_dialects.conversations.store import Store, StoreError, StoreSettings
from caravan_dialects.conversations.tables import VERSIONS
from caravan_dialects.sql.connection import Place, sqlite
from caravan_scheduler.core.tokens import Alternative, GeneratedToken

NOW = 1_000_000.0
LARGE = Bounds(max_bytes=1 << 30, life_s=3600, job_life_s=60)
TOKEN = GeneratedToken(7, b"\xff a", False, -0.5, (Alternative(8, b"b", True, -1.0),), None)


def job(name: str = "r", owner: str = "k") -> Job:
    return Job(id=name, owner=owner, request=b"{}", response=b'{"status":"queued"}')


def step(first: int, count: int = 1, tokens: int = 0, feedback: float | None = None) -> Step:
    events = tuple(f"event {first + number}".encode() for number in range(count))
    return Step(first=first, events=events, tokens=(TOKEN,) * tokens, feedback=feedback)


def end(first: int, name: str = "r", response: bytes = b"") -> Transaction:
    ended = JobEnd(id=name, step=step(first), response=response)
    node = None if response else Node(id=name, items=({"id": "i"},), response=b'{"status":"completed"}')
    return Transaction(node=node, ended=ended)


Begun = Callable[..., Database]


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    opened = Database(place if isinstance(place, str) else None, LARGE)
    yield opened
    opened.close()


@pytest.fixture
def begun(database: Database) -> Begun:
    def add(*steps: Step) -> Database:
        database.jobs.add(job(), step(0, 2), NOW)
        for each in steps:
            database.jobs.append("r", each)
        return database

    return add


def numbers(events: list[bytes]) -> list[int]:
    return [int(event.split()[1]) for event in events]


def test_events_are_read_from_any_number_on(begun: Begun) -> None:
    # A step may have tokens and no event: their text is held back.
    database = begun(step(2, 3, 3), step(5, 0, 1), step(5, 1, 1), step(6, 4, 2))
    for first in range(12):
        assert numbers(database.jobs.events("r", first)) == list(range(first, 10))
    assert database.jobs.events("other", 0) == []


def test_many_events_come_in_parts(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "MOST_EVENTS", 3)
    database = begun(step(2), step(3), step(4))
    assert numbers(database.jobs.events("r", 0)) == [0, 1, 2]
    assert numbers(database.jobs.events("r", 3)) == [3, 4]


def test_tokens_come_back_with_the_feedback_of_the_last(begun: Begun) -> None:
    database = begun(step(2, 1, 2, 0.5), step(3, 1, 1, 0.25), step(4, 1))
    assert database.jobs.tokens("r") == ([TOKEN] * 3, 0.25)


def test_a_step_that_does_not_follow_is_not_added(begun: Begun) -> None:
    database = begun(step(2))
    for first in (2, 4):
        database.jobs.append("r", step(first))
    assert numbers(database.jobs.events("r", 0)) == [0, 1, 2]
    database.jobs.append("deleted", step(0))
    assert database.jobs.events("deleted", 0) == []


def test_a_job_ends_with_its_turn_or_with_neither(begun: Begun) -> None:
    database = begun(step(2, 1, 1))
    missing = Transaction(node=Node(id="r", parent=Position(node="gone", items=1)), ended=JobEnd(id="r", step=step(3)))
    assert not database.commit("k", missing, NOW)
    assert [one.id for one in database.jobs.under_way()] == ["r"]
    assert database.commit("k", end(3), NOW)
    assert database.jobs.under_way() == []
    assert database.response("k", "r", NOW) == b'{"status":"completed"}'
    assert numbers(database.jobs.events("r", 0)) == [0, 1, 2, 3]
    found = database.jobs.find("k", "r")
    assert found is not None
    assert (found.ended, found.request, found.response, found.next) == (True, b"", b"", 4)
    assert database.jobs.find("other", "r") is None


def test_what_a_job_extends_stays_until_its_end(place: Place) -> None:
    """Also if its client deletes it, if it expires, and if the server of the job ends."""
    at = Position(node="before", items=1)
    for ends in (True, False):
        database = Database(place, LARGE)
        database.commit("k", Transaction(node=Node(id="before", items=({"id": "b"},), response=b"{}")), NOW)
        assert database.jobs.add(replace(job(), position=at), step(0), NOW) is Added.ADDED
        database.jobs.leave()
        database.close()
        database = Database(place, LARGE)
        assert [one.id for one in database.jobs.under_way()] == ["r"]
        assert database.delete_response("k", "before")
        assert database.response("k", "r", NOW + 10_000) is None
        found = database.jobs.find("k", "r")
        assert found is not None
        assert found.position == at
        chain = database.chain("k", at)
        assert chain is not None
        assert chain.items == [{"id": "b"}]
        if ends:
            assert database.commit("k", end(1, response=b"{}"), NOW)
        else:
            assert database.delete_response("k", "r")
        assert database.chain("k", at) is None
        database.delete_response("k", "r")
        assert database.used_bytes() == {}
        database.close()


def test_a_job_of_an_earlier_version_has_no_position(tmp_path: Path) -> None:
    file = tmp_path / "state"
    with closing(sqlite(file)) as connection:
        connection.migrate(VERSIONS[:4])
        connection.execute("INSERT INTO jobs VALUES ('r', 'k', X'7b7d', X'7b7d', 0, FALSE, 1, 1, 0, FALSE)")
    database = Database(file, LARGE)
    found = database.jobs.find("k", "r")
    assert found is not None
    assert found.position is None
    database.close()


def test_bytes_count_for_the_owner_until_all_is_gone(begun: Begun) -> None:
    database = begun(*(step(first, 1, 1) for first in range(2, 50)))
    before = database.used_bytes()["k"]
    assert before > 48 * 60
    database.commit("k", end(50, response=b'{"status":"failed"}'), NOW)
    assert 0 < database.used_bytes()["k"] < before + 200
    assert database.delete_response("k", "r")
    assert database.used_bytes() == {}
    assert database.jobs.events("r", 0) == []
    assert not database.delete_response("k", "r")


def test_events_expire_after_the_end_and_never_before(begun: Begun) -> None:
    database = begun()
    database.response("k", "r", NOW + 10_000)
    assert [one.id for one in database.jobs.under_way()] == ["r"]
    database.commit("k", end(2), NOW + 10_000)
    database.response("k", "r", NOW + 10_050)
    assert database.jobs.find("k", "r") is not None
    assert database.response("k", "r", NOW + 10_070) is not None, "the turn is kept"
    assert database.jobs.find("k", "r") is None


def test_ended_jobs_make_room_and_others_stay(place: Place) -> None:
    bounds = Bounds(max_bytes=20_000, life_s=3600)
    database = Database(place, bounds)
    for number in range(60):
        name = f"r{number}"
        database.jobs.add(job(name), step(0), NOW + number)
        if number:
            database.commit("k", end(1, name, b"x" * 400), NOW + number)
    assert database.used_bytes()["k"] <= bounds.max_bytes
    assert database.jobs.find("k", "r0") is not None, "it is under way"
    assert database.jobs.find("k", "r1") is None
    assert database.jobs.find("k", "r59") is not None
    database.close()


async def read(log: EventLog, first: int) -> list[int]:
    found: list[bytes] = []
    async for events in log.read(first):
        found += events
    return numbers(found)


async def test_readers_get_each_event_once_wherever_they_begin(place: Place) -> None:
    store = Store(StoreSettings(place=place))
    log = EventLog(store, "r")
    first = step(0, 2)
    await log.record(first, store.add_job(job(), first, 1))
    readers = [asyncio.create_task(read(log, number)) for number in (0, 1, 5, 600)]
    number = 2
    while number < 1000:
        more = step(number, 1 + number % 7)
        number += len(more.events)
        await log.record(more, store.append("r", more))
        if number % 50 == 0:  # Readers that come in between.
            readers.append(asyncio.create_task(read(log, number // 2)))
    # In a shared store, another server could add events to what has not ended.
    last = end(number, response=b"{}")
    assert last.ended is not None
    await log.record(last.ended.step, store.commit("k", last))
    number += 1
    log.close()
    begins = [0, 1, 5, 600]
    for reader, begin in zip(readers, begins, strict=False):
        assert await reader == list(range(begin, number))
    for reader in readers[len(begins) :]:
        found = await reader
        assert found == list(range(found[0], number))
    # Another router knows the store only.
    other = EventLog(store, "r", number)
    other.close()
    assert await read(other, 7) == list(range(7, number))
    await store.close()


async def test_what_is_not_stored_is_not_shown() -> None:
    log = EventLog(Store(StoreSettings()), "r")

    async def refuse() -> None:
        raise StoreError

    with pytest.raises(StoreError):
        await log.record(step(0), refuse())
    log.close()
    assert await read(log, 0) == []


async def test_what_is_stored_is_shown_although_its_writer_is_cancelled() -> None:
    log = EventLog(Store(StoreSettings()), "r")
    begun_to_store, stored = asyncio.Event(), asyncio.Event()

    async def storing() -> None:
        begun_to_store.set()
        await stored.wait()

    writing = asyncio.create_task(log.record(step(0), storing()))
    await begun_to_store.wait()
    writing.cancel()
    await asyncio.sleep(0)
    stored.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    log.close()
    assert await read(log, 0) == [0]
