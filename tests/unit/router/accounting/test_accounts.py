"""Accounts over files: what a killed router has counted is kept, and counts against budgets."""

import asyncio
import os
import sqlite3
from pathlib import Path

import pytest

from caravan_dialects.auth.usage import DAY_S, Kind, Period
from caravan_proto.messages.results import FinishReason
from caravan_router.accounting.accounts import Accounts, AccountsSettings
from caravan_router.accounting.audit_cli import main as audit
from caravan_router.accounting.ledger import MOST_SESSIONS
from caravan_router.accounting.table import UsageFileError
from caravan_scheduler.actions import Deliver, Start
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_scheduler.events import Submitted
from caravan_testing.requests import request
from caravan_testing.waiting import eventually

# The last day of a month.
DAY = 20_088


class Clock:
    def __init__(self) -> None:
        self.day = DAY

    def __call__(self) -> float:
        return self.day * DAY_S + 100.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


def settings(folder: Path) -> AccountsSettings:
    return AccountsSettings(file=folder / "usage.db", audit_log=folder / "audit.log")


def token(finish: FinishReason | None = None) -> GeneratedToken:
    return GeneratedToken(1, b"a", False, None, (), finish)


def use(accounts: Accounts, request_id: int, key: str = "alice", session: str = "", prompt: int = 5) -> None:
    """Let a request get two tokens, and end."""
    made = request(request_id, [1] * prompt, 2, tenant=Tenant(name=key), session=session)
    accounts.note("toy", [Submitted(made)], [Start(request_id, "a", prompt, 0)])
    accounts.note("toy", [], [Deliver(request_id, (), (token(),))])
    accounts.note("toy", [], [Deliver(request_id, (), (token(FinishReason.LENGTH),))])


def kill(accounts: Accounts) -> None:
    """Do what the system does when a process is killed."""
    assert accounts._journal is not None
    accounts._journal.close(is_saved=False)


async def opened(folder: Path, clock: Clock) -> Accounts:
    accounts = Accounts(settings(folder), clock)
    await accounts.open()
    return accounts


async def journals(folder: Path) -> list[Path]:
    return await asyncio.to_thread(lambda: [*folder.glob("*.journal")])


async def used(accounts: Accounts, day: int = DAY) -> dict[str, tuple[int, int]]:
    """Return prompt and output of each key on a day."""
    rows = await accounts.read(range(day, day + 1), Kind.COMPLETIONS, ("key",), {})
    return {account.key: (counts.prompt, counts.output) for account, counts in rows}


async def test_what_a_killed_router_has_counted_is_kept(tmp_path: Path, clock: Clock) -> None:
    first = await opened(tmp_path, clock)
    use(first, 1)
    await first.save()
    use(first, 2, "bob")
    use(first, 3)
    kill(first)
    second = await opened(tmp_path, clock)
    assert await used(second) == {"alice": (10, 4), "bob": (5, 2)}
    assert second.spent("alice").of(Period.DAY) == 14
    use(second, 1)
    assert second.spent("alice").of(Period.MONTH) == 21
    await second.close()
    assert await journals(tmp_path) == []
    third = await opened(tmp_path, clock)
    assert await used(third) == {"alice": (15, 6), "bob": (5, 2)}
    await third.close()
    assert await asyncio.to_thread(audit, ["verify", str(tmp_path / "audit.log")]) == 0


async def test_a_router_that_runs_keeps_its_journal_and_counts_for_the_others(tmp_path: Path, clock: Clock) -> None:
    first, second = await opened(tmp_path, clock), await opened(tmp_path, clock)
    use(first, 1)
    use(second, 1)
    assert len(await journals(tmp_path)) == 2
    await first.save()
    await second.read_elsewhere()
    assert second.spent("alice").of(Period.DAY) == 14
    await first.close()
    await second.close()


async def test_days_and_months_begin_at_midnight(tmp_path: Path, clock: Clock) -> None:
    accounts = await opened(tmp_path, clock)
    made = request(1, [1] * 5, 9, tenant=Tenant(name="alice"))
    accounts.note("toy", [Submitted(made)], [Start(1, "a", 5, 0)])
    accounts.note("toy", [], [Deliver(1, (), (token(),))])
    clock.day -= 1  # A clock that is set back changes nothing.
    accounts.note("toy", [], [Deliver(1, (), (token(),))])
    clock.day += 2
    assert accounts.spent("alice").of(Period.DAY) == accounts.spent("alice").of(Period.MONTH) == 0
    accounts.note("toy", [], [Deliver(1, (), (token(FinishReason.LENGTH),))])
    assert (await used(accounts), await used(accounts, DAY + 1)) == ({"alice": (5, 2)}, {"alice": (0, 1)})
    # The rows of the day that has ended are forgotten, and their slots are free again.
    assert {row.account.day for row in accounts.ledger._rows.values()} == {DAY + 1}
    await accounts.close()
    second = await opened(tmp_path, clock)
    assert second.spent("alice").of(Period.MONTH) == 1
    await second.close()


async def test_a_client_that_invents_sessions_gets_no_more_rows(tmp_path: Path, clock: Clock) -> None:
    accounts = await opened(tmp_path, clock)
    for number in range(MOST_SESSIONS + 40):
        use(accounts, number, session=f"s{number}")
    rows = await accounts.read(range(DAY, DAY + 1), Kind.COMPLETIONS, ("session",), {"key": ["alice"]})
    assert len(rows) == MOST_SESSIONS + 1
    assert rows[0][0].session == ""
    assert rows[0][1].output == 2 * 40
    await accounts.close()


async def test_files_that_fail_are_logged_and_written_later(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accounts = await opened(tmp_path, clock)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        use(accounts, 1)
        await eventually(lambda: accounts._auditing is None, "the audit log was tried")
    [record] = caplog.records
    assert "cannot be written, requests go on" in record.message
    use(accounts, 2)
    assert await used(accounts) == {"alice": (10, 4)}
    await accounts.close()
    lines = await asyncio.to_thread((tmp_path / "audit.log").read_bytes)
    assert lines.count(b"\n") == 2


async def test_a_file_of_something_else_is_refused(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "usage.db"
    await asyncio.to_thread(file.write_text, "no database " * 100)
    with pytest.raises(UsageFileError, match=r"usage\.db: file is not a database"):
        await Accounts(settings(tmp_path), clock).open()
    await asyncio.to_thread(file.unlink)

    def write_newer() -> None:
        database = sqlite3.connect(file)
        database.execute("PRAGMA user_version = 9")
        database.close()

    await asyncio.to_thread(write_newer)
    with pytest.raises(UsageFileError, match="a newer version of Caravan wrote it"):
        await Accounts(settings(tmp_path), clock).open()
