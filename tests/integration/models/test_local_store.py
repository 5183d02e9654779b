"""What the cache holds: named, shown and removed."""

import fcntl
from dataclasses import replace
from pathlib import Path

import pytest

from caravan_models import cached_model, cli
from caravan_models.download import download
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.hub import HubSettings
from caravan_models.local_store import StoredModel, stored_models, unfinished
from caravan_models.local_store import remove as remove_model
from caravan_models.progress import ignore_progress
from caravan_models.reference import HubModel, NamedFile, Quantisation, parse_hub
from caravan_testing.stand_in_hub import StandInHub, small_gguf

FILES = {
    "small-Q4_0.gguf": small_gguf(4000, seed=4),
    "small-Q8_0.gguf": small_gguf(8000, seed=8),
    "big-F16-00001-of-00002.gguf": small_gguf(5000, seed=1),
    "big-F16-00002-of-00002.gguf": small_gguf(6000, seed=2),
    "mmproj-F16.gguf": small_gguf(1000, seed=3),
}


@pytest.fixture
def filled(hub: StandInHub, settings: HubSettings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with all models of a repository. The commands use it."""
    hub.add("demo/small", FILES)
    for quantisation in ("Q4_0", "Q8_0", "F16"):
        download(HubModel("demo/small", Quantisation(quantisation)), settings, ignore_progress)
    for module in (cli, cached_model):
        monkeypatch.setattr(module, "cache_folder", lambda: settings.cache)
    return settings.cache


def names(cache: Path) -> list[str]:
    return [model.name for model in stored_models(cache)]


def size_of(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file() and not path.is_symlink())


def test_models_are_named_as_they_are_asked_for(filled: Path) -> None:
    models = {model.name: replace(model, modified_s=0.0) for model in stored_models(filled)}
    assert list(models.values()) == [
        StoredModel("demo/small:F16", "F16", 12000, 0.0),
        StoredModel("demo/small:Q4_0", "Q4_0", 5000, 0.0),
        StoredModel("demo/small:Q8_0", "Q8_0", 9000, 0.0),
    ]
    for name in models:
        assert parse_hub(name).name == name


def test_an_old_commit_is_named_by_its_beginning(filled: Path, hub: StandInHub, settings: HubSettings) -> None:
    hub.commit = "6b" * 20
    download(HubModel("demo/small", Quantisation("Q4_0")), settings, ignore_progress)
    [old] = [name for name in names(filled) if name.startswith("demo/small:Q4_0@")]
    assert old == f"demo/small:Q4_0@{'5a' * 6}"
    remove_model(parse_hub(old), filled)
    assert "demo/small:Q4_0" in names(filled)
    assert old not in names(filled)
    remove_model(HubModel("demo/small", Quantisation("Q4_0")), filled)
    assert names(filled) == [f"demo/small:{tag}@{'5a' * 6}" for tag in ("F16", "Q8_0")]


def test_a_model_is_removed_and_the_others_stay(filled: Path) -> None:
    before = size_of(filled)
    assert remove_model(HubModel("demo/small", Quantisation("F16")), filled) == 11000
    assert before - size_of(filled) == 11000
    assert names(filled) == ["demo/small:Q4_0", "demo/small:Q8_0"]
    # The projector goes with the last model that needs it.
    assert remove_model(HubModel("demo/small", NamedFile("small-Q4_0.gguf")), filled) == 4000
    assert remove_model(HubModel("demo/small"), filled) == 9000
    assert names(filled) == []
    assert not list(filled.glob("models--*"))
    with pytest.raises(FetchError, match="`caravan list` names what it has") as failed:
        remove_model(HubModel("demo/small"), filled)
    assert failed.value.problem is FetchProblem.NOT_CACHED


def test_what_has_come_of_a_download_is_removed_unless_it_runs(
    hub: StandInHub, settings: HubSettings, cache: Path
) -> None:
    hub.add("demo/small", FILES)
    hub.faults.cut_after = [3000] + [0] * 9
    model = HubModel("demo/small", Quantisation("Q8_0"))
    with pytest.raises(FetchError, match="cut off"):
        download(model, settings, ignore_progress)
    assert [(one.repository, one.size) for one in unfinished(cache)] == [("demo/small", 3000)]
    [lock] = cache.rglob("*.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FetchError, match="is being downloaded; end that first") as failed:
            remove_model(model, cache)
    assert failed.value.problem is FetchProblem.BUSY
    assert remove_model(model, cache) == 3000
    assert unfinished(cache) == []


def test_list_has_a_line_for_each_model(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.list_models([]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "QUANTISATION", "SIZE", "CHANGED"]
    assert [line.split()[:4] for line in lines] == [
        ["hf:demo/small:F16", "F16", "12.0", "kB"],
        ["hf:demo/small:Q4_0", "Q4_0", "5.0", "kB"],
        ["hf:demo/small:Q8_0", "Q8_0", "9.0", "kB"],
    ]
    assert cli.list_models(["--known"]) == 0
    assert "\nsmollm2:135m  hf:bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M\n" in capsys.readouterr().out


def test_show_says_what_a_model_is(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.show_model(["hf:demo/small:F16"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [tuple(line) for line in lines[:6]] == [
        ("name", "demo/small:F16"),
        ("architecture", "llama"),
        ("parameters", "0"),
        ("quantisation", "F16"),
        ("context", "2,048 tokens"),
        ("size", "12.0 kB (12,000 bytes)"),
    ]
    assert [label for label, _ in lines[6:]] == ["digest", "file", "file", "projector"]
    # A file of this machine, with the other parts beside it.
    path = lines[7][1].partition(" (")[0]
    assert cli.show_model([path]) == 0
    shown = capsys.readouterr().out
    assert "big-F16-00002-of-00002.gguf" in shown
    assert "mmproj-F16.gguf" in shown


@pytest.mark.parametrize(
    ("command", "words", "line"),
    [
        (cli.show_model, ["hf:demo/small:Q5_0"], "caravan show: error: the cache"),
        (cli.show_model, ["missing.gguf"], "caravan show: error: cannot use missing.gguf: No such file or directory"),
        (cli.show_model, ["nothing"], "caravan show: error: nothing: there is no such file"),
        (cli.remove_models, ["hf:demo/small"], "caravan rm: error: demo/small can be one of several models"),
        (cli.remove_models, ["hf:demo/small:Q8_0", "nothing"], "caravan rm: error: nothing: there is no such file"),
        (cli.pull, ["missing.gguf"], "caravan pull: error: missing.gguf is a file, not the name of a model"),
    ],
)
def test_a_command_that_fails_says_why_in_one_line(
    command: "object",
    words: list[str],
    line: str,
    filled: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert callable(command)
    assert command(words) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(line)
    assert output.err.count("\n") == 1
    assert len(names(filled)) == 3


def test_rm_says_what_is_free_then(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.remove_models(["hf:demo/small:q8_0", "hf:demo/small:F16"]) == 0
    assert capsys.readouterr().out == "removed demo/small:Q8_0: 8.0 kB\nremoved demo/small:F16: 11.0 kB\n"
    assert names(filled) == ["demo/small:Q4_0"]
