"""Files and batches on the disk: room, what is left of uploads, what stays of a batch."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from caravan_dialects.bulk.file_table import Upload
from caravan_dialects.bulk.records import Answered, AnswerKind, Batch, BatchStatus, Counts, Line, StoredFile
from caravan_dialects.bulk.store import BulkSettings, Tables
from caravan_dialects.conversations.nodes import new_id
from caravan_dialects.sql.connection import Place

BATCH = Batch(id="batch", owner="one", endpoint="/", input_file="file", window="1h", created=0.0, deadline=1.0, total=3)


@pytest.fixture
def opened(tmp_path: Path, place: Place) -> Iterator[Callable[[], Tables]]:
    """Open the tables as one more server does."""
    with ExitStack() as stack:

        def opened() -> Tables:
            if isinstance(place, str):
                tables = Tables(tmp_path / new_id("files"), BulkSettings(place=place))
            else:
                tables = Tables(tmp_path / "files", BulkSettings(place=tmp_path / "files"))
            stack.callback(tables.close)
            return tables

        yield opened


@pytest.fixture
def tables(opened: Callable[[], Tables]) -> Tables:
    return opened()


def uploaded(tables: Tables, size: int) -> Upload:
    upload = tables.begin_upload()
    upload.write(b"x" * size)
    return upload


def file(name: str, size: int) -> StoredFile:
    return StoredFile(id=name, owner="one", purpose="batch", name=name, size=size, created=0.0)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("bulk.sqlite")}


def test_a_batch_and_its_input_file_are_added_together_or_not_at_all(tables: Tables) -> None:
    first, second, third = uploaded(tables, 50), uploaded(tables, 10), uploaded(tables, 50)
    assert tables.add_batch_of(first, file("file", 50), BATCH, 1000) == file("file", 50)
    assert tables.add_batch_of(second, file("again", 10), replace(BATCH, input_file="again"), 1000) is None
    assert tables.add_batch_of(third, file("large", 50), replace(BATCH, id="other"), 60) == 0
    for upload in (first, second, third):
        upload.close()
    assert names(tables.folder) == {"file"}
    assert [one.id for one in tables.unfinished()] == ["batch"]
    assert [tables.file("one", name) is not None for name in ("file", "again", "large")] == [True, False, False]


def test_uploads_that_fit_alone_do_not_fit_together(tables: Tables) -> None:
    first, second = uploaded(tables, 50), uploaded(tables, 50)
    assert tables.keep_upload(first, file("first", 50), 100) == file("first", 50)
    assert tables.keep_upload(second, file("second", 50), 100) == 0
    second.close()
    assert names(tables.folder) == {"first"}


def just_before(tables: Tables, other: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have another server write before the next transaction of this one begins."""
    connection = tables._connection
    begin = connection.transaction

    def late() -> AbstractContextManager[None]:
        monkeypatch.setattr(connection, "transaction", begin)
        other()
        return begin()

    monkeypatch.setattr(connection, "transaction", late)


def test_uploads_to_two_servers_do_not_fit_together_either(
    opened: Callable[[], Tables], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = opened(), opened()
    one, other = uploaded(first, 50), uploaded(second, 50)
    just_before(first, lambda: second.keep_upload(other, file("other", 50), 100), monkeypatch)
    assert first.keep_upload(one, file("one", 50), 100) == 0
    one.close()
    assert (first.file("one", "one"), first.file("one", "other")) == (None, file("other", 50))


def test_the_first_upload_of_an_id_is_kept(opened: Callable[[], Tables], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = opened(), opened()
    one, other = uploaded(first, 3), uploaded(second, 2)
    just_before(first, lambda: second.keep_upload(other, file("f", 2), 100), monkeypatch)
    assert first.keep_upload(one, file("f", 3), 100) == file("f", 2)
    one.close()
    for tables in (first, second):
        assert tables.path_of("f").read_bytes() == b"xx"


def test_an_upload_that_cannot_be_noted_leaves_no_file(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    upload, keep = uploaded(tables, 1), Upload.keep_as

    def kept(upload: Upload, path: Path) -> None:
        keep(upload, path)
        raise sqlite3.OperationalError("the disk is full")

    monkeypatch.setattr(Upload, "keep_as", kept)
    with pytest.raises(sqlite3.Error, match="the disk is full"):
        tables.keep_upload(upload, file("f", 1), 100)
    assert names(tables.folder) == set()
    assert tables.file("one", "f") is None


def test_answers_take_room_before_they_are_in_a_file(tables: Tables) -> None:
    tables.begin(BATCH, [Line(number=0, custom_id="a", start=0, size=1)])
    assert tables.room("other", 100) == 50
    tables.answered("batch", Answered(0, b"x" * 40, AnswerKind.COMPLETED))
    assert (tables.room("one", 100), tables.room("other", 100)) == (10, 30)


def test_of_a_batch_that_has_ended_only_the_counts_stay(tables: Tables) -> None:
    tables.begin(BATCH, [Line(number=number, custom_id=f"{number}", start=0, size=1) for number in range(3)])
    for number, kind in enumerate(AnswerKind):
        tables.answered("batch", Answered(number, b"%d" % number, kind))
    tables.finish(replace(BATCH, status=BatchStatus.COMPLETED, output_file="output", error_file="error"))
    found = tables.batch("one", "batch")
    assert found is not None
    assert (found[0].status, found[1]) == (BatchStatus.COMPLETED, Counts(1, 1, 1))
    assert tables.unanswered("batch", -1) == []
    assert ((tables.folder / "output").read_bytes(), (tables.folder / "error").read_bytes()) == (b"0\n", b"1\n2\n")
    # The files alone: 2 and 4 bytes.
    assert tables.room("one", 112) == 50


def test_what_a_server_left_of_an_upload_goes_and_what_still_comes_stays(tables: Tables) -> None:
    left = uploaded(tables, 1)
    [path] = tables.folder.glob("incoming*")
    os.utime(path, (0, time.time() - 7200))
    coming = uploaded(tables, 1)
    assert tables.room("one", 100) == 50
    assert path.name not in names(tables.folder)
    left.close()
    assert tables.keep_upload(coming, file("coming", 1), 100) == file("coming", 1)


def test_a_batch_that_is_to_be_cancelled_is_only_cancelled_and_one_that_is_done_is_not(tables: Tables) -> None:
    assert tables.write_batch(BATCH)
    assert tables.write_batch(replace(BATCH, status=BatchStatus.CANCELLING))
    for status in (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.FAILED, BatchStatus.COMPLETED):
        assert not tables.write_batch(replace(BATCH, status=status))
    assert not tables.begin(replace(BATCH, status=BatchStatus.IN_PROGRESS), [])
    assert tables.finish(replace(BATCH, status=BatchStatus.CANCELLED))
    done = replace(BATCH, id="done", status=BatchStatus.FINALIZING)
    assert tables.write_batch(done)
    assert not tables.write_batch(replace(done, status=BatchStatus.CANCELLING))


def test_answers_are_written_in_the_order_of_the_lines_however_many_there_are(tables: Tables) -> None:
    count = 250
    tables.begin(BATCH, [Line(number=number, custom_id=f"{number}", start=0, size=1) for number in range(count)])
    for number in reversed(range(count)):
        tables.answered("batch", Answered(number, b"%d" % number, AnswerKind.COMPLETED))
    assert tables.finish(replace(BATCH, status=BatchStatus.COMPLETED, output_file="output"))
    assert tables.path_of("output").read_bytes() == b"".join(b"%d\n" % number for number in range(count))
