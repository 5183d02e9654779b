"""Everything that the documents point at is there: links, files, commands, flags, metrics."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import doc_tables
import pytest
from doc_tables import ROOT

from caravan_router.config import RouterConfig
from caravan_router.metrics.table import METRICS
from caravan_serve.cli import ServeConfig
from caravan_serve.commands import main
from caravan_shard.config import ShardConfig

PAGES = doc_tables.documents()
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_FILE = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(conf|json|md|proto|py|sh|toml|txt))")
# A document names a file from the root, or within one of these packages.
_PACKAGES = (
    ROOT,
    ROOT / "router",
    ROOT / "router/caravan_dialects",
    ROOT / "router/caravan_router",
    ROOT / "router/caravan_scheduler",
    ROOT / "router/caravan_serve",
    ROOT / "router/caravan_studio",
    ROOT / "shard/caravan_shard",
    ROOT / "models/caravan_models",
    ROOT / "proto/caravan_proto",
)
# Folders that exist on a machine, not in the repository.
_LOCAL = (".cache/", ".venv/")
# Command lines of programs that are not ours, or that get flags of these, with the lines that continue them.
_OTHERS = re.compile(
    r"^(\w+=\w+ )?(buildah|docker|helm|kubectl|lm_eval|make images|mmdebstrap|systemctl) (.*\\\n)*.*$", re.MULTILINE
)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _code(text: str) -> list[str]:
    """The code blocks and code spans of a document."""
    blocks = _BLOCK.findall(text)
    return [*blocks, *_SPAN.findall(_BLOCK.sub("", text))]


def _own_code(page: Path) -> list[str]:
    """The code blocks and code spans of a document, without the command lines of programs that are not ours."""
    return [_OTHERS.sub("", code) for code in _code(page.read_text())]


def _spans(page: Path) -> list[str]:
    return [" ".join(span.split()) for span in _SPAN.findall(_BLOCK.sub("", page.read_text()))]


def _slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _anchors(page: Path) -> set[str]:
    """The anchors of all headings of a document; a second heading of the same words is numbered."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    anchors: list[str] = []
    for slug in map(_slug, headings):
        anchors.append(f"{slug}-{anchors.count(slug)}" if slug in anchors else slug)
    return set(anchors)


def _flags() -> set[str]:
    configs: tuple[type[Any], ...] = (ServeConfig, RouterConfig, ShardConfig)
    flags = {f"--{field.name.replace('_', '-')}" for config in configs for field in dataclasses.fields(config)}
    # Aliases, and the flags of other commands, are named where they are added to a parser.
    for folder in ("proto", "models", "router", "shard", "tests/bench", "tests/gpu/kit", "tests/soak"):
        for file in (ROOT / folder).rglob("*.py"):
            flags.update(re.findall(r'"(--[a-z-]+)"', file.read_text()))
    return flags


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in _LINK.findall(_BLOCK.sub("", page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_list_of_contents_names_every_section(page: Path) -> None:
    head, _, rest = page.read_text().partition("\n## ")
    listed = re.findall(r"\]\(#([^)]+)\)", head) if "\n- [" in head else []
    if listed:
        slugs = {_slug(heading) for heading in re.findall(r"^## (.*)$", f"## {rest}", re.MULTILINE)}
        assert slugs <= set(listed), slugs - set(listed)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    for span in _spans(page):
        if "/" in span and _FILE.fullmatch(span) and not span.startswith(_LOCAL):
            assert any((folder / span).exists() for folder in _PACKAGES), span


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_target_of_make_exists(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for code in _code(page.read_text()):
        assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) <= set(targets), code


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_subcommand_exists(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["caravan", "--help"])
    assert main() == 0
    commands = re.findall(r"^  ([a-z-]+) ", capsys.readouterr().out, re.MULTILINE)
    assert "serve" in commands
    for code in _own_code(page):
        # `from caravan import` is Python.
        assert set(re.findall(r"(?<![\w./-])(?<!from )caravan ([a-z]+(?:-[a-z]+)*)", code)) <= set(commands), code


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_flag_exists(page: Path) -> None:
    flags = _flags()
    for code in _own_code(page):
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)) <= flags | {"--help"}, code


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_metric_exists(page: Path) -> None:
    packages = {folder.name for folder in _PACKAGES}
    recorded = re.findall(r"record: (\w+)", (ROOT / "deploy/helm/caravan/templates/autoscaling.yaml").read_text())
    metrics = {metric.name for metric in METRICS} | set(recorded)
    for span in _spans(page):
        if re.fullmatch(r"(tgi|caravan)_[a-z_]+", span):
            assert span in metrics | packages | {"caravan_testing"}, span
