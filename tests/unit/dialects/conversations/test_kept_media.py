"""Pictures and sounds of items are stored once for each owner, and removed with the last node that has them."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from caravan_dialects.conversations import tables
from caravan_dialects.conversations.database import Bounds, Database
from caravan_dialects.conversations.nodes import START, ExactTokens, Json, Node, Position, Transaction
from caravan_dialects.conversations.packing import packed, unpacked
from caravan_proto.messages.media import MediaSpan
from caravan_scheduler.core.prompt_media import cell_numbers

NOW = 1_000_000.0
LARGE = Bounds(max_bytes=1 << 30, life_s=3600)
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


def items(database: Database, owner: str, name: str) -> list[Json]:
    chain = database.node(owner, name, NOW)
    assert chain is not None
    return chain.items


def test_items_come_back_as_they_were() -> None:
    database = Database(None, LARGE)
    given = [message("a", PICTURE, OTHER), output("b", PICTURE), sound("c", "UklG" * 1000), message("d", "data:,x")]
    add(database, "k", node("r", given))
    assert items(database, "k", "r") == given


def test_a_picture_takes_its_room_once_for_each_owner() -> None:
    database = Database(None, LARGE)
    add(database, "k", node("r1", [message("a", PICTURE, PICTURE)]))
    once = database.used_bytes()["k"]
    assert len(PICTURE) < once < 2 * len(PICTURE)
    add(database, "k", node("r2", [message("b", PICTURE)], Position(node="r1", items=1)))
    assert database.used_bytes()["k"] < once + 2000
    add(database, "other", node("r3", [message("c", PICTURE)]))
    assert database.used_bytes()["other"] > len(PICTURE)


def test_a_picture_goes_with_the_last_node_that_has_it() -> None:
    database = Database(None, LARGE)
    add(database, "k", node("r1", [message("a", PICTURE)]), node("r2", [message("b", PICTURE)]))
    add(database, "k", node("r3", [message("c", OTHER)]))
    assert database.delete_node("k", "r1")
    assert items(database, "k", "r2") == [message("b", PICTURE)]
    assert database.delete_node("k", "r2")
    assert items(database, "k", "r3") == [message("c", OTHER)]
    assert database.used_bytes()["k"] < len(OTHER) + 2000
    assert database.delete_node("k", "r3")
    assert database.used_bytes() == {}


def test_a_refused_transaction_leaves_no_picture() -> None:
    database = Database(None, LARGE)
    gone = Position(node="gone", items=1)
    assert not database.commit("k", Transaction(node=node("r", [message("a", PICTURE)], gone)), NOW)
    assert database.used_bytes() == {}


def test_pictures_count_when_room_is_needed() -> None:
    database = Database(None, Bounds(max_bytes=3 * len(PICTURE), life_s=3600))
    for number in range(8):
        add(database, "k", node(f"r{number}", [message("a", "data:," + str(number) * 10_000)]))
    assert sum(database.used_bytes().values()) <= 3 * len(PICTURE)
    assert database.node("k", "r7", NOW) is not None
    assert database.node("k", "r0", NOW) is None


def test_the_size_of_a_chain_counts_every_picture_that_it_shows() -> None:
    database = Database(None, LARGE)
    add(database, "k", node("r", [message("a", PICTURE), message("b", PICTURE)]))
    chain = database.node("k", "r", NOW)
    assert chain is not None
    assert chain.size > 2 * len(PICTURE)


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
    assert items(database, "k", "old") == [{"id": "a"}]
    add(database, "k", node("new", [message("b", PICTURE)], Position(node="old", items=1)))
    assert items(database, "k", "new") == [{"id": "a"}, message("b", PICTURE)]
    database.close()


CELLS = cell_numbers(MediaSpan(offset=0, media_id=b"m" * 32, count=5, positions=5), b"encoder")


@pytest.mark.parametrize(
    "tokens", [(), (1, 2, 3), tuple(CELLS), (0, *CELLS[:2], 2**31, *CELLS), (2**32,), (2**32 + 2**96 - 1,)]
)
def test_tokens_of_media_are_kept_too(tokens: tuple[int, ...]) -> None:
    assert tuple(unpacked(packed(tokens))) == tokens


def test_tokens_are_shared_with_those_of_the_parent_also_among_cells() -> None:
    database = Database(None, LARGE)
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
        chain = database.node("k", name, NOW)
        assert chain is not None
        assert chain.tokens is not None
        assert chain.tokens.token_ids == expected
