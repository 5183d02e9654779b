"""Stages are processes with a time limit, which go on where they were."""

import io
import time
from pathlib import Path

import pytest
from gpu.kit import stages
from gpu.kit.job import UNFINISHED, Job, UnfinishedError, keep, kept
from gpu.kit.stages import STAGES, End, Record, Stage, records, run
from gpu.kit.tests import counted

# Longer than any run of these tests.
_LEFT_S = 86_400
JOB = Job(rehearsal=True, until=time.time() + _LEFT_S)


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("gpu.kit.job.RESULTS", tmp_path)
    monkeypatch.setattr(stages, "_RECORDS", tmp_path / "stages.json")
    return tmp_path


def _run_program(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[End, str]:
    """Run a stage of the name ``trial`` that is ``program``; return how it ended, and its log."""
    (folder / "gpu" / "kit").mkdir(parents=True, exist_ok=True)
    (folder / "gpu" / "kit" / "trial.py").write_text(program)
    (folder / "tests").unlink(missing_ok=True)
    (folder / "tests").symlink_to(folder)
    monkeypatch.setattr(stages, "ROOT", folder)
    # Python takes a module of the same second and size for the one it has compiled before.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    log = io.StringIO()
    return run(Stage(name="trial", what="a trial", before=True), JOB, log), log.getvalue()


def test_every_stage_has_a_module() -> None:
    folder = Path(stages.__file__).parent
    assert [stage.name for stage in STAGES if not (folder / f"{stage.name}.py").is_file()] == []


def test_the_end_of_a_stage_is_that_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, end in ((0, End.DONE), (1, End.FAILED), (UNFINISHED, End.UNFINISHED)):
        found, log = _run_program(f"print('said')\nraise SystemExit({status})", tmp_path, monkeypatch)
        assert found is end
        assert "said\n" in log
        assert records()["trial"].end is end


def test_a_stage_is_told_what_it_is_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = _run_program("import sys\nprint(sys.argv[1:])", tmp_path, monkeypatch)
    assert f"['--until', '{JOB.until}', '--rehearsal']\n" in log


def test_the_times_of_the_runs_of_a_stage_are_summed_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", iter(range(0, 1000, 10)).__next__)
    ended = [_run_program(f"raise SystemExit({status})", tmp_path, monkeypatch)[0] for status in (UNFINISHED, 0)]
    assert ended == [End.UNFINISHED, End.DONE]
    assert records()["trial"] == Record(seconds=20, runs=2, end=End.DONE)
    _run_program("", tmp_path, monkeypatch)
    assert records()["trial"] == Record(seconds=10, runs=1, end=End.DONE)


def test_a_job_without_the_needed_time_is_not_finished() -> None:
    JOB.need(1)
    with pytest.raises(UnfinishedError, match=f"what comes next takes about {2 * _LEFT_S} s"):
        JOB.need(2 * _LEFT_S)


def test_results_are_kept_by_kind_and_name() -> None:
    keep("rows", "a", {"figure": 1})
    keep("rows", "b", {"figure": 2})
    keep("bound", "a", {"figure": 3})
    assert kept("rows") == {"a": {"figure": 1}, "b": {"figure": 2}}
    assert kept("stall") == {}


def test_tests_are_counted_by_their_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase name='fine'/><testcase name='left'><skipped/></testcase>"
        "<testcase name='wrong'><failure/></testcase>"
        "<testcase name='broken'><error/></testcase></testsuite></testsuites>"
    )
    assert counted(report) == {"passed": 1, "skipped": 1, "failed": ["wrong", "broken"]}
    assert counted(tmp_path / "none.xml") == {"passed": 0, "skipped": 0, "failed": ["no report: pytest did not end"]}
