"""The version stands in `caravan_proto.__version__`. What cannot read it there has the same."""

import re
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version

import pytest
import yaml
from doc_tables import ROOT, documents

import caravan_router.__main__
import caravan_serve.commands
import caravan_shard.cli
from caravan_proto import __version__
from caravan_router.metrics.recorder import Metrics


@pytest.mark.parametrize(
    ("run", "program"),
    [
        (caravan_serve.commands.main, "caravan"),
        (caravan_router.__main__.main, "caravan-router"),
        (caravan_shard.cli.main, "caravan-shard"),
    ],
)
def test_each_program_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Callable[[], int], program: str
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--version"])
    try:
        status = run()
    except SystemExit as end:
        status = int(end.code or 0)
    assert (status, capsys.readouterr().out) == (0, f"{program} {__version__}\n")


async def test_the_metrics_have_it() -> None:
    assert f'caravan_build_info{{version="{__version__}"}} 1\n' in (await Metrics().render()).decode()


def test_the_packages_have_it() -> None:
    assert version("llama-caravan") == __version__
    kernels = tomllib.loads((ROOT / "shard/kernels/pyproject.toml").read_text())
    assert kernels["project"]["version"] == __version__


def test_the_chart_has_it() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/caravan/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


def test_the_changelog_begins_with_it() -> None:
    newest = re.search(r"^## (\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert __version__.startswith(f"{newest[1]}.")


def test_images_that_are_named_have_it() -> None:
    named = [
        tag
        for path in (ROOT / "compose.yaml", *documents())
        for tag in re.findall(r"caravan-(?:router|shard):(\d[\w.]*)", path.read_text())
    ]
    assert set(named) == {__version__}
