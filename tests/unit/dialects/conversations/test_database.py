"""Nodes, heads, owners, files, bounds and crashes of the store."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Protocol

import pytest

from caravan_dialects.conversations import tables
from caravan_dialects.conversations.database import RESERVED_BYTES, Bounds, Database, StateFileError
from caravan_dialects.conversations.nodes import START, Chain, ExactTokens, Head, Json, Node, Position, Transaction
from caravan_dialects.conversations.packing import packed, unpacked
from caravan_dialects.conversations.store import Store, StoreSettings
from caravan_dialects.sql.connection import Place, Sqlite
from caravan_proto.messages.media import MediaSpan
from caravan_scheduler.core.prompt_media import cell_numbers

NOW = 1_000_000.0
LARGE = Bounds(max_bytes=1 << 30, life_s=3600)
CELLS = cell_numbers(MediaSpan(offset=0, media_id=b"m" * 32, count=5, positions=5), b"encoder")


def turn(name: str, parent: Position = START, tokens: Sequence[int] = (), fingerprint: str = "f") -> Node:
    """Return a response of two items."""
    exact = ExactTokens(fingerprint=fingerprint, token_ids=tuple(tokens)) if tokens else None
    items = ({"id": f"{name}-in"}, {"id": f"{name}-out"})
    return Node(id=name, parent=parent, items=items, inputs=1, response=b"{}", tokens=exact)


def at(node: str, items: int = 2) -> Position:
    return Position(node=node, items=items)


def head(name: str, position: Position = START) -> Head:
    return Head(id=name, created=NOW, position=position)


STARTED = Transaction(node=turn("r1"), head=head("c", at("r1")))


class Opened(Protocol):
    def __call__(self, bounds: Bounds = LARGE, pinned: Sequence[str] = ()) -> Database: ...


@pytest.fixture
def memory(place: Place) -> Iterator[Opened]:
    """Open a new database: SQLite's in memory, or PostgreSQL's."""
    with ExitStack() as stack:

        def opened(bounds: Bounds = LARGE, pinned: Sequence[str] = ()) -> Database:
            database = Database(place if isinstance(place, str) else None, bounds, pinned)
            stack.callback(database.close)
            return database

        yield opened


def chain_of(database: Database, owner: str, node: str) -> Chain:
    chain = database.node(owner, node, NOW)
    assert chain is not None
    return chain


def ids(database: Database, owner: str, node: str) -> list[str] | None:
    chain = database.node(owner, node, NOW)
    return None if chain is None else [item["id"] for item in chain.items]


def tokens_of(database: Database, owner: str, node: str) -> Sequence[int]:
    tokens = chain_of(database, owner, node).tokens
    assert tokens is not None
    return tokens.token_ids


def test_a_chain_has_the_items_and_the_tokens_of_all_its_nodes(memory: Opened) -> None:
    database = memory()
    assert database.commit("a", Transaction(node=turn("r1", tokens=(1, 2, 3))), NOW)
    assert database.commit("a", Transaction(node=turn("r2", at("r1"), (1, 2, 3, 4, 5))), NOW)
    # Its prompt differs from that of its parent after two tokens.
    assert database.commit("a", Transaction(node=turn("r3", at("r2"), (1, 2, 9, 9))), NOW)
    # Another file of the model has tokens of its own.
    assert database.commit("a", Transaction(node=turn("r4", at("r3"), (1, 2), "g")), NOW)
    for name, tokens in (("r1", (1, 2, 3)), ("r2", (1, 2, 3, 4, 5)), ("r3", (1, 2, 9, 9)), ("r4", (1, 2))):
        assert tokens_of(database, "a", name) == tokens
        assert chain_of(database, "a", name).position == at(name)
    assert ids(database, "a", "r2") == ["r1-in", "r1-out", "r2-in", "r2-out"]


def test_a_child_may_continue_any_item_of_its_parent(memory: Opened) -> None:
    database = memory()
    database.commit("a", Transaction(node=turn("r1")), NOW)
    assert database.commit("a", Transaction(node=turn("r2", at("r1", 1))), NOW)
    assert ids(database, "a", "r2") == ["r1-in", "r2-in", "r2-out"]
    assert chain_of(database, "a", "r2").size == len('[{"id":"r1-in"}]' + '[{"id":"r2-in"},{"id":"r2-out"}]')
    for missing in (at("r1", 3), at("r9"), at("r1", 0)):
        assert not database.commit("a", Transaction(node=turn("r3", missing)), NOW)
    assert ids(database, "a", "r3") is None


def test_an_owner_sees_and_changes_only_its_own(memory: Opened) -> None:
    database = memory()
    database.commit("a", Transaction(node=turn("r1"), head=head("c1", at("r1"))), NOW)
    assert database.node("b", "r1", NOW) is None
    assert database.head("b", "c1", NOW) is None
    assert not database.commit("b", Transaction(node=turn("r2", at("r1"))), NOW)
    assert not database.commit("b", Transaction(head=head("c2", at("r1"))), NOW)
    assert not database.commit("b", Transaction(head=head("c1"), expected=at("r1")), NOW)
    assert not database.delete_response("b", "r1")
    assert not database.delete_head("b", "c1")
    assert ids(database, "a", "r1") == ["r1-in", "r1-out"]
    assert list(database.used_bytes()) == ["a"]


def test_a_head_moves_only_from_where_it_is_expected(memory: Opened) -> None:
    database = memory()
    database.commit("a", STARTED, NOW)
    assert database.commit(
        "a", Transaction(node=turn("r2", at("r1")), head=head("c", at("r2")), expected=at("r1")), NOW
    )
    lost = Transaction(node=turn("r3", at("r1")), head=head("c", at("r3")), expected=at("r1"))
    assert not database.commit("a", lost, NOW)
    assert ids(database, "a", "r3") is None, "nothing of a change that lost is written"
    found = database.head("a", "c", NOW)
    assert found is not None
    assert found.position == at("r2")


def test_a_deleted_response_stays_while_others_continue_it(memory: Opened) -> None:
    database = memory()
    database.commit("a", Transaction(node=turn("r1")), NOW)
    database.commit("a", Transaction(node=turn("r2", at("r1"))), NOW)
    assert database.delete_response("a", "r1")
    assert not database.delete_response("a", "r1")
    assert ids(database, "a", "r1") is None
    assert ids(database, "a", "r2") == ["r1-in", "r1-out", "r2-in", "r2-out"]
    assert database.delete_response("a", "r2")
    assert database.used_bytes() == {}


def test_items_of_a_conversation_go_with_the_last_head_that_has_them(memory: Opened) -> None:
    database = memory()
    added = Node(id="n", items=({"id": "i"},))
    database.commit("a", Transaction(node=added, head=head("c1", at("n", 1))), NOW)
    database.commit("a", Transaction(head=head("c2", at("n", 1))), NOW)
    assert ids(database, "a", "n") is None, "it is no response"
    assert database.commit("a", Transaction(head=head("c1"), expected=at("n", 1)), NOW)
    found = database.conversation("a", "c2", NOW)
    assert found is not None
    assert [item["id"] for item in found[1].items] == ["i"]
    assert database.delete_head("a", "c2")
    assert database.delete_head("a", "c1")
    assert database.used_bytes() == {}


def test_entries_expire_after_their_last_use(memory: Opened) -> None:
    database = memory(Bounds(max_bytes=1 << 30, life_s=100))
    database.commit("a", STARTED, NOW)
    database.commit("a", Transaction(node=turn("r2")), NOW)
    assert database.head("a", "c", NOW + 90) is not None
    assert database.node("a", "r2", NOW + 110) is None
    assert database.head("a", "c", NOW + 180) is not None, "it was used at 90 s"
    assert database.head("a", "c", NOW + 300) is None
    assert database.used_bytes() == {}


def test_ten_thousand_conversations_stay_within_the_bound(memory: Opened) -> None:
    limit = 1 << 20
    database = memory(Bounds(max_bytes=limit, life_s=3600))
    for number in range(10_000):
        node = Node(id=f"n{number}", items=({"text": "x" * 200},))
        assert database.commit(
            "a", Transaction(node=node, head=head(f"c{number}", at(node.id, 1))), NOW + number * 1e-6
        )
    assert limit / 2 < sum(database.used_bytes().values()) <= limit
    assert database.head("a", "c0", NOW) is None
    assert database.head("a", "c9999", NOW) is not None


def test_who_holds_most_makes_room(memory: Opened) -> None:
    database = memory(Bounds(max_bytes=200_000, life_s=3600))
    database.commit("small", Transaction(node=turn("old")), NOW)
    for number in range(1000):
        database.commit("large", Transaction(node=turn(f"r{number}")), NOW + 1 + number * 1e-6)
    assert ids(database, "small", "old") == ["old-in", "old-out"]


def test_nodes_in_use_or_with_children_are_never_removed(memory: Opened) -> None:
    pinned = ["r1"]
    database = memory(Bounds(max_bytes=20_000, life_s=100), pinned)
    database.commit("a", Transaction(node=turn("r0")), NOW)
    database.commit("a", Transaction(node=turn("r1", at("r0"))), NOW)
    for number in range(100):
        database.commit("a", Transaction(node=turn(f"x{number}")), NOW + 1)
    assert ids(database, "a", "r1") == ["r0-in", "r0-out", "r1-in", "r1-out"]
    assert database.node("a", "r1", NOW + 1000) is not None
    pinned.clear()
    assert database.node("a", "r1", NOW + 3000) is None


def test_a_file_is_read_again_and_is_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "state"
    database = Database(file, LARGE)
    database.commit("a", Transaction(node=turn("r1", tokens=(7, 8)), head=head("c", at("r1"))), NOW)
    database.close()
    assert file.stat().st_mode & 0o077 == 0
    again = Database(file, LARGE)
    found = again.conversation("a", "c", NOW)
    assert found is not None
    assert found[1].tokens == ExactTokens(fingerprint="f", token_ids=(7, 8))
    again.close()


def test_two_routers_may_have_it_open(place: Place) -> None:
    first, second = Database(place, LARGE), Database(place, LARGE)
    first.commit("a", STARTED, NOW)
    move = Transaction(node=turn("r2", at("r1")), head=head("c", at("r2")), expected=at("r1"))
    assert second.commit("a", move, NOW)
    assert not first.commit("a", Transaction(head=head("c"), expected=at("r1")), NOW)
    first.close()
    second.close()


def test_who_moves_a_head_keeps_metadata_that_others_have_changed_meanwhile(memory: Opened) -> None:
    database = memory()
    database.commit("a", STARTED, NOW)
    changed = replace(head("c", at("r1")), metadata={"a": "b"})
    assert database.commit("a", Transaction(head=changed, expected=at("r1")), NOW)
    used = database.used_bytes()
    assert database.commit("a", Transaction(head=head("c", at("r1", 1)), expected=at("r1"), moves=True), NOW)
    assert database.head("a", "c", NOW) == replace(changed, position=at("r1", 1))
    assert database.used_bytes() == used


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(StateFileError, match="not a database"):
        Database(tmp_path / "text", LARGE)
    with pytest.raises(StateFileError):
        Database(tmp_path / "missing" / "state", LARGE)


def test_what_cannot_be_written_can_still_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Reading marks entries as used and removes expired ones. Neither is possible on a full disk."""
    file = tmp_path / "state"
    database = Database(file, Bounds(max_bytes=1 << 30, life_s=100))
    database.commit("a", Transaction(node=turn("old")), NOW - 50)
    database.commit("a", STARTED, NOW)
    with closing(sqlite3.connect(file)) as other:
        for table, change in product(("heads", "nodes"), ("UPDATE", "DELETE")):
            full = "BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
            other.execute(f"CREATE TRIGGER full_{table}_{change} BEFORE {change} ON {table} {full}")
    assert database.node("a", "r1", NOW + 60) is not None
    assert database.head("a", "c", NOW + 60) is not None
    assert database.node("a", "old", NOW + 60) is not None, "it has expired and could not be removed"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["entries cannot be removed, or marked as used: the disk is full"] * 4
    database.close()


def test_entries_are_forgotten_on_a_full_disk(tmp_path: Path) -> None:
    """Nothing can be written to the disk as long as the room that is kept for forgetting is taken."""
    reserve = tmp_path / "state-reserve"
    database = Database(tmp_path / "state", LARGE)
    database.commit("a", STARTED, NOW)
    database.commit("a", Transaction(node=turn("r2", at("r1"))), NOW)
    connection = database._connection
    assert isinstance(connection, Sqlite)
    run = connection.execute
    connection.create_function("is_full", 0, lambda: reserve.stat().st_size >= RESERVED_BYTES)
    for table, change in product(("heads", "nodes"), ("INSERT", "UPDATE", "DELETE")):
        full = "WHEN is_full() BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
        run(f"CREATE TEMP TRIGGER full_{table}_{change} BEFORE {change} ON {table} {full}")
    with pytest.raises(sqlite3.Error, match="the disk is full"):
        database.commit("a", Transaction(node=turn("r3")), NOW)
    assert not database.delete_response("b", "r2")
    assert not database.delete_head("a", "unknown")
    assert database.delete_response("a", "r2")
    assert database.delete_head("a", "c")
    assert database.node("a", "r1", NOW) is not None
    assert database.delete_response("a", "r1")
    assert run("SELECT count(*) FROM nodes").fetchall() == [(0,)]
    assert reserve.stat().st_size == RESERVED_BYTES
    assert reserve.stat().st_mode & 0o777 == 0o600
    database.close()


# Forks a writer, kills it, and checks that every turn that it reported is whole; a hundred times on one file.
CRASHES = """
import os, random, signal, sys, time
from pathlib import Path
from caravan_dialects.conversations.database import Bounds, Database
from caravan_dialects.conversations.nodes import START, Transaction, Head, Node, Position

file, bounds, draw = sys.argv[1], Bounds(max_bytes=1 << 30, life_s=1e9), random.Random(1)
is_file = not file.startswith("postgresql:")
file = Path(file) if is_file else file

def write(report, number):
    database = Database(file, bounds)
    position, turns = START, 0
    assert database.commit("a", Transaction(head=Head(id=f"c{number}", created=1.0)), 1.0)
    while True:
        node = Node(id=f"{number}-{turns}", parent=position, items=({"text": "x" * 3000},), response=b"{}")
        moved = Head(id=f"c{number}", created=1.0, position=Position(node=node.id, items=1))
        assert database.commit("a", Transaction(node=node, head=moved, expected=position), 1.0)
        position, turns = moved.position, turns + 1
        os.write(report, b".")

for number in range(100):
    reading, report = os.pipe()
    child = os.fork()
    if child == 0:
        write(report, number)
    os.close(report)
    os.read(reading, 1)
    time.sleep(draw.random() / 200)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reported = 1
    while data := os.read(reading, 4096):
        reported += len(data)
    os.close(reading)
    database = Database(file, bounds)
    head, chain = database.conversation("a", f"c{number}", 1.0)
    assert reported <= len(chain.items) <= reported + 1, (reported, len(chain.items))
    assert len(chain.nodes) == len(chain.items)
    if is_file and number % 10 == 9:
        assert database._connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()
"""


def test_a_kill_in_the_middle_of_writes_loses_at_most_that_turn(place: Place) -> None:
    command = [sys.executable, "-c", CRASHES, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr


PICTURE, OTHER = ("data:image/png;base64," + letter * 10_000 for letter in "AB")


def message(name: str, *pictures: str) -> Json:
    parts: list[Json] = [{"type": "input_image", "image_url": picture, "detail": "auto"} for picture in pictures]
    return {"id": name, "type": "message", "role": "user", "content": [{"type": "input_text", "text": "See"}, *parts]}


def output(name: str, picture: str) -> Json:
    return {"id": name, "type": "function_call_output", "output": [{"type": "input_image", "image_url": picture}]}


def sound(name: str, data: str) -> Json:
    part = {"type": "input_audio", "input_audio": {"format": "wav", "data": data}}
    return {"id": name, "type": "message", "role": "user", "content": [part]}


def node(name: str, items: Sequence[Json], parent: Position = START) -> Node:
    return Node(id=name, parent=parent, items=tuple(items), inputs=1, response=b"{}")


def add(database: Database, owner: str, *nodes: Node) -> None:
    for one in nodes:
        assert database.commit(owner, Transaction(node=one), NOW)


def test_items_come_back_as_they_were(memory: Opened) -> None:
    database = memory()
    given = [message("a", PICTURE, OTHER), output("b", PICTURE), sound("c", "UklG" * 1000), message("d", "data:,x")]
    add(database, "k", node("r", given))
    assert chain_of(database, "k", "r").items == given


def test_a_picture_takes_its_room_once_for_each_owner(memory: Opened) -> None:
    database = memory()
    add(database, "k", node("r1", [message("a", PICTURE, PICTURE)]))
    once = database.used_bytes()["k"]
    assert len(PICTURE) < once < 2 * len(PICTURE)
    add(database, "k", node("r2", [message("b", PICTURE)], Position(node="r1", items=1)))
    assert database.used_bytes()["k"] < once + 2000
    add(database, "other", node("r3", [message("c", PICTURE)]))
    assert database.used_bytes()["other"] > len(PICTURE)


def test_a_picture_goes_with_the_last_node_that_has_it(memory: Opened) -> None:
    database = memory()
    add(database, "k", node("r1", [message("a", PICTURE)]), node("r2", [message("b", PICTURE)]))
    add(database, "k", node("r3", [message("c", OTHER)]))
    assert database.delete_response("k", "r1")
    assert chain_of(database, "k", "r2").items == [message("b", PICTURE)]
    assert database.delete_response("k", "r2")
    assert chain_of(database, "k", "r3").items == [message("c", OTHER)]
    assert database.used_bytes()["k"] < len(OTHER) + 2000
    assert database.delete_response("k", "r3")
    assert database.used_bytes() == {}


def test_a_refused_transaction_leaves_no_picture(memory: Opened) -> None:
    database = memory()
    gone = Position(node="gone", items=1)
    assert not database.commit("k", Transaction(node=node("r", [message("a", PICTURE)], gone)), NOW)
    assert database.used_bytes() == {}


def test_pictures_count_when_room_is_needed(memory: Opened) -> None:
    database = memory(Bounds(max_bytes=3 * len(PICTURE), life_s=3600))
    for number in range(8):
        add(database, "k", node(f"r{number}", [message("a", "data:," + str(number) * 10_000)]))
    assert sum(database.used_bytes().values()) <= 3 * len(PICTURE)
    assert database.node("k", "r7", NOW) is not None
    assert database.node("k", "r0", NOW) is None


def test_the_size_of_a_chain_counts_every_picture_that_it_shows(memory: Opened) -> None:
    database = memory()
    add(database, "k", node("r", [message("a", PICTURE), message("b", PICTURE)]))
    assert chain_of(database, "k", "r").size > 2 * len(PICTURE)


def test_a_file_of_the_version_before_is_brought_up_to_date(tmp_path: Path) -> None:
    file = tmp_path / "state"
    with closing(sqlite3.connect(file)) as connection, connection:
        for statement in tables.VERSIONS[0]:
            connection.execute(statement)
        connection.execute(
            "INSERT INTO nodes VALUES ('old', 'k', NULL, 0, '[{\"id\":\"a\"}]', 1, 1, '{}', '', 0, '', 1, 0, 500, ?)",
            (NOW,),
        )
        connection.execute("PRAGMA user_version = 1")
    database = Database(file, LARGE)
    assert chain_of(database, "k", "old").items == [{"id": "a"}]
    add(database, "k", node("new", [message("b", PICTURE)], Position(node="old", items=1)))
    assert chain_of(database, "k", "new").items == [{"id": "a"}, message("b", PICTURE)]
    database.close()


@pytest.mark.parametrize(
    "tokens", [(), (1, 2, 3), tuple(CELLS), (0, *CELLS[:2], 2**31, *CELLS), (2**32,), (2**32 + 2**96 - 1,)]
)
def test_tokens_of_media_are_kept_too(tokens: tuple[int, ...]) -> None:
    assert tuple(unpacked(packed(tokens))) == tokens


def test_tokens_are_shared_with_those_of_the_parent_also_among_cells(memory: Opened) -> None:
    database = memory()
    tokens = (1, 2, *CELLS, 3)
    first = Node(id="r1", items=({"id": "a"},), response=b"{}", tokens=ExactTokens(fingerprint="f", token_ids=tokens))
    second = Node(
        id="r2",
        parent=Position(node="r1", items=1),
        items=({"id": "b"},),
        response=b"{}",
        tokens=ExactTokens(fingerprint="f", token_ids=(*tokens[:5], 7)),
    )
    add(database, "k", first, second)
    for name, expected in (("r1", tokens), ("r2", (*tokens[:5], 7))):
        assert tokens_of(database, "k", name) == expected


async def test_turns_are_there_again_after_a_restart(place: Place) -> None:
    settings = StoreSettings(place=place)
    store = Store(settings)
    await store.open()
    node = Node(id="resp_1", items=({"id": "msg_1"},), response=b"{}")
    head = Head(id="conv_1", created=1.0, position=Position(node="resp_1", items=1))
    assert await store.commit("a", Transaction(node=node, head=head))
    await store.close()
    again = Store(settings)
    found = await again.conversation("a", "conv_1")
    assert found is not None
    assert found[0] == head
    assert found[1].items == [{"id": "msg_1"}]
    assert await again.response("b", "resp_1") is None
    await again.close()


async def test_what_is_in_use_stays_until_the_last_user_has_ended() -> None:
    store = Store(StoreSettings(life_s=0.2))
    node = Node(id="resp_1", items=({"id": "msg_1"},), response=b"{}")
    assert await store.commit("a", Transaction(node=node))
    with store.pinning("resp_1"):
        with store.pinning("resp_1"):
            await asyncio.sleep(0.4)
            assert await store.commit("a", Transaction(node=Node(id="resp_2", items=({"id": "x"},), response=b"{}")))
        await asyncio.sleep(0.4)
        assert await store.response("a", "resp_1") is not None
    await store.close()
