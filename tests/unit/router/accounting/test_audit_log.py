"""The audit log: whatever is changed in it, the verifier finds it, and routers continue each other's chain."""

import hashlib
import os
import random
from pathlib import Path

import msgspec
import pytest

from caravan_dialects.auth.usage import Account, Counts, Kind
from caravan_router.accounting.audit_cli import main
from caravan_router.accounting.audit_log import AuditLog, AuditLogError, described
from caravan_router.accounting.ledger import Ended

LINES = 12


def entry(number: int) -> dict[str, object]:
    account = Account(20_000, "alice", "s", "toy", Kind.COMPLETIONS)
    ended = Ended(account=account, request_id=f"r{number}", counts=Counts(prompt=5, output=number), status="length")
    return described(ended, 1.75e9 + number)


def write(path: Path, *numbers: int) -> None:
    log = AuditLog(path)
    log.append(map(entry, numbers))
    log.close()


def verified(*words: str | Path) -> int:
    return main(["verify", *map(str, words)])


def head(path: Path) -> str:
    found: str = msgspec.json.decode(path.read_bytes().splitlines()[-1])["hash"]
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "audit.log"
    write(path, *range(LINES))
    return path


def test_a_line_says_who_when_what_and_how_it_ended(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = log.read_bytes().splitlines(keepends=True)[3]
    assert msgspec.json.decode(line) == {
        "line": 4,
        "time": "2025-06-15T15:06:43.000+00:00",
        "key": "alice",
        "session": "s",
        "model": "toy",
        "kind": "completions",
        "request": "r3",
        "status": "length",
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "output_tokens": 3,
        "recomputed_tokens": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "prev": msgspec.json.decode(log.read_bytes().splitlines()[2])["hash"],
        "hash": hashlib.sha256(line[: line.index(b',"hash":')]).hexdigest(),
    }
    assert verified(log) == 0
    assert capsys.readouterr().out == f"{LINES} lines, the last one has the hash {head(log)}\n"


def test_each_changed_inserted_or_removed_byte_is_found(log: Path) -> None:
    content = log.read_bytes()
    choose = random.Random(7)
    places = {*range(0, len(content), 97), *range(len(content) - 90, len(content))}
    for at in places:
        flipped = content[at] ^ (1 << choose.randrange(8))
        for changed in (
            content[:at] + bytes([flipped]) + content[at + 1 :],
            content[:at] + content[at + 1 :],
            content[:at] + bytes([choose.randrange(256)]) + content[at:],
        ):
            log.write_bytes(changed)
            assert verified(log) == 1 or changed == content, at


def test_each_removed_repeated_or_exchanged_line_is_found(log: Path) -> None:
    last = head(log)
    lines = log.read_bytes().splitlines(keepends=True)
    for number in range(LINES):
        for changed in (
            lines[:number] + lines[number + 1 :],
            lines[: number + 1] + lines[number:],
            lines[:number] + lines[number : number + 2][::-1] + lines[number + 2 :],
        ):
            log.write_bytes(b"".join(changed))
            # Only who knows an earlier end sees that the end is gone.
            assert verified(log, "--head", last) == 1 or changed == lines, number
    log.write_bytes(b"".join(lines))
    assert verified(log, "--head", last) == 0


def test_a_moved_file_is_continued_in_a_new_one(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.log", tmp_path / "audit.log.1"
    first, second = AuditLog(path), AuditLog(path)
    first.append([entry(1)])
    path.rename(old)
    # As a router that has the file open writes at the moment when it is moved: both chains are one.
    second._path = old
    second.append([entry(2)])
    second._path = path
    first.append([entry(3)])
    second.append([entry(4)])
    first.close()
    second.close()
    assert len(old.read_bytes().splitlines()) == len(path.read_bytes().splitlines()) == 2
    assert verified(old, path) == 0
    assert verified(path) == 1
    assert verified("--after", head(old), path) == 0
    assert verified("--after", head(path), path) == 1
    assert verified(path, old) == 1


def test_a_router_continues_the_log_and_removes_a_line_that_was_cut_off(log: Path) -> None:
    content = log.read_bytes()
    log.write_bytes(content + content[:40])
    write(log, 12)
    assert len(log.read_bytes().splitlines()) == LINES + 1
    assert verified(log) == 0


def test_on_a_full_disk_nothing_is_written_in_part(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, write_all = log.read_bytes(), os.pwrite
    written = AuditLog(log)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, data, at: write_all(file, data[:10], at))
        with pytest.raises(OSError, match="No space left"):
            written.append([entry(20), entry(21)])
    assert log.read_bytes() == content
    written.append([entry(22)])
    written.close()
    assert verified(log) == 0


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AuditLogError, match=f"{tmp_path}: Is a directory"):
        AuditLog(tmp_path)
    assert verified(tmp_path / "none") == 2
    assert "none: No such file or directory" in capsys.readouterr().err
