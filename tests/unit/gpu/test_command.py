"""The command runs the stages that are left, stops where nothing can follow, and leaves the page."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from gpu.kit import __main__ as command
from gpu.kit.job import Job
from gpu.kit.stages import STAGES, End, Record, Stage

NAMES = [stage.name for stage in STAGES]


class Played:
    """Stages that end as ``ends`` says, ``done`` without. Those of ``before`` have ended when the command starts."""

    def __init__(self, ends: Mapping[str, End] | None = None, before: Mapping[str, End] | None = None) -> None:
        self.ends = ends or {}
        self.records = {name: Record(seconds=1.0, runs=1, end=end) for name, end in (before or {}).items()}
        self.ran: list[str] = []

    def run(self, stage: Stage, job: Job, log: object) -> End:
        self.ran.append(stage.name)
        end = self.ends.get(stage.name, End.DONE)
        self.records[stage.name] = Record(seconds=1.0, runs=1, end=end)
        return end


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(command, "kept", lambda kind: {})
    return tmp_path


def _command(monkeypatch: pytest.MonkeyPatch, folder: Path, played: Played, *arguments: str) -> int:
    monkeypatch.setattr(command, "run", played.run)
    monkeypatch.setattr(command, "records", lambda: played.records)
    monkeypatch.setattr(sys, "argv", ["kit.sh", "--out", str(folder / "out"), *arguments])
    return command.main()


def test_all_stages_run_in_their_order_and_leave_a_page(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    played = Played()
    assert _command(monkeypatch, folder, played) == 0
    assert played.ran == NAMES
    assert "| build | 1 | 1 | done |" in (folder / "out" / "report.md").read_text()
    assert {path.name for path in (folder / "out").iterdir()} == {"report.md", "results.json", "kit.log"}


def test_what_has_ended_does_not_run_again_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    ended = {"install": End.DONE, "build": End.UNFINISHED, "models": End.DONE, "tests": End.FAILED}
    played = Played(before=ended)
    assert _command(monkeypatch, folder, played) == 1  # the tests have failed, whenever that was
    assert played.ran == ["build", *NAMES[NAMES.index("tests") + 1 :]]
    played = Played(before=ended)
    _command(monkeypatch, folder, played, "tests")
    assert played.ran == ["tests"]
    # Without this one, none of the others could run.
    played = Played(before={"install": End.DONE, "build": End.FAILED})
    assert _command(monkeypatch, folder, played) == 0
    assert played.ran == NAMES[1:]


def test_nothing_follows_a_stage_that_is_not_finished(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    played = Played({"tests": End.UNFINISHED})
    assert _command(monkeypatch, folder, played) == 75
    assert played.ran[-1] == "tests"
    assert (folder / "out" / "report.md").is_file()


def test_the_others_follow_a_failure_that_they_can_go_without(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    played = Played({"tests": End.FAILED})
    assert _command(monkeypatch, folder, played) == 1
    assert played.ran == NAMES
    played = Played({"build": End.FAILED})
    assert _command(monkeypatch, folder, played) == 1
    assert played.ran[-1] == "build"


def test_a_stage_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        _command(monkeypatch, folder, Played(), "rows", "row")
    assert refused.value.code == 2
