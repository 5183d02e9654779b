"""Documents say of the program what it says of itself, and everything that they point at is there."""

import dataclasses
import re
import sys
from array import array
from pathlib import Path
from typing import Any

import comparisons
import doc_tables
import msgspec
import pytest
from doc_tables import ROOT

from caravan_dialects.api.error_table import INTERNAL, TABLE
from caravan_dialects.api.errors import BudgetError, RequestError
from caravan_dialects.api.openai.errors import openai_status, openai_type
from caravan_proto.messages.commands import RunNote, Save, SaveEntry
from caravan_proto.shard.v1 import shard_pb2
from caravan_proto.wire import SAVE, encode_command
from caravan_router.config import RouterConfig
from caravan_router.engine.reply_codec import saved_runs
from caravan_router.http.routes import ROUTES
from caravan_router.metrics.table import BUILD_INFO, FORMER_NAMES, HTTP_REQUESTS, METRICS
from caravan_scheduler.core.errors import EngineError
from caravan_scheduler.events import SavedRun
from caravan_serve.commands import main
from caravan_serve.serve_flags import ServeConfig
from caravan_shard.config import ShardConfig
from caravan_shard.protocol.commands import StoredRun
from caravan_shard.service.codec import runs_responses

DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text() for path in doc_tables.documents()}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_tables_are_current(document: str) -> None:
    text = DOCUMENTS[document]
    assert text == doc_tables.with_tables(text), f"{document} is not current: run `make docs`"


def test_every_table_is_in_one_document() -> None:
    found = sorted(name for text in DOCUMENTS.values() for name in doc_tables.table_names(text))
    assert found == sorted(doc_tables.TABLES)


def test_the_charts_are_current() -> None:
    written = {path: path.read_text() for path in comparisons.CHARTS.iterdir()}
    assert written == comparisons.charts(), "run `make docs`"


def test_every_chart_is_shown() -> None:
    page = DOCUMENTS["docs/performance.md"]
    missing = [path.name for path in comparisons.charts() if f"(charts/{path.name})" not in page]
    assert not missing


def test_every_marker_belongs_to_a_table() -> None:
    for document, text in DOCUMENTS.items():
        markers = text.count("<!-- ")
        assert markers == 2 * len(doc_tables.table_names(text)), document


def test_every_route_is_named() -> None:
    page = DOCUMENTS["docs/http-api.md"]
    missing = [f"{route.method} {route.path}" for route in ROUTES if f"`{route.method} {route.path}`" not in page]
    assert not missing


def test_every_call_to_a_shard_is_named() -> None:
    page = DOCUMENTS["docs/architecture.md"]
    calls = [call.name for call in shard_pb2.DESCRIPTOR.services_by_name["ShardService"].methods]
    missing = [name for name in calls if f"`{name}`" not in page]
    assert not missing


def test_every_error_that_clients_see_is_in_the_table() -> None:
    def leaves(kind: type[Exception]) -> list[type[Exception]]:
        return [leaf for child in kind.__subclasses__() for leaf in leaves(child)] or [kind]

    for base in (RequestError, EngineError):
        missing = [kind.__name__ for kind in leaves(base) if not any(parent in TABLE for parent in kind.__mro__)]
        assert not missing


def test_the_type_of_an_error_follows_from_its_status() -> None:
    rule = (
        "`type` is `rate_limit_error` with 429, `server_error` with 424 and from 500 on, else `invalid_request_error`."
    )
    assert rule in " ".join(DOCUMENTS["docs/http-api.md"].split())
    for kind in (*TABLE.values(), INTERNAL):
        if kind is TABLE[BudgetError]:
            continue  # A type of its own, as OpenAI has it.
        status = openai_status(kind)
        server = "server_error" if status in {424, *range(500, 600)} else "invalid_request_error"
        assert openai_type(kind) == ("rate_limit_error" if status == 429 else server), kind


def test_every_document_and_decision_is_in_the_index() -> None:
    index = DOCUMENTS["docs/README.md"]
    for path in (ROOT / "docs").rglob("*.md"):
        target = path.relative_to(ROOT / "docs")
        assert f"({target})" in index or target.name == "README.md", target


def test_decisions_are_numbered_without_gaps() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(name.partition("-")[0]) for name in names] == list(range(1, len(names) + 1))
    for name in names:
        title, parts = DOCUMENTS[f"docs/decisions/{name}"].partition("\n")[::2]
        assert title.startswith(f"# {name.partition('-')[0]}. "), name
        status = re.match(r"\nStatus: (accepted|superseded by \[\d{4}\])", parts)
        assert status, f"{name} has no status"
        for part in ("Context", "Decision", "Why", "Rejected", "Consequences"):
            assert f"\n**{part}.**" in parts, f"{name} has no part {part}"


def test_the_front_page_stays_short() -> None:
    most_words = 701
    assert len(DOCUMENTS["README.md"].split()) < most_words


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
    r"^(\w+=\w+ )?(buildah|docker|helm|kubectl|lm_eval|make images|mmdebstrap|pip|systemctl) (.*\\\n)*.*$", re.MULTILINE
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
    metrics = {metric.name for metric in (*METRICS, BUILD_INFO, HTTP_REQUESTS)} | FORMER_NAMES.keys() | set(recorded)
    for span in _spans(page):
        if re.fullmatch(r"(tgi|caravan)_[a-z_]+", span):
            assert span in metrics | packages | {"caravan_testing"}, span


_ROW = re.compile(r"^\| ([^|]+) \| `([^`|]+)` \| ([^|]+) \|$", re.MULTILINE)
_TEXT = (ROOT / "docs/glossary.md").read_text()
TERMS = [(match[1], match[2]) for match in _ROW.finditer(_TEXT)]
_GLOSSARY_PACKAGES = (
    "caravan",
    "proto/caravan_proto",
    "models/caravan_models",
    "router/caravan_dialects",
    "router/caravan_router",
    "router/caravan_scheduler",
    "router/caravan_serve",
    "router/caravan_studio",
    "shard/caravan_shard",
)


@pytest.fixture(scope="module")
def words() -> set[str]:
    """All words of the product's code and docstrings."""
    files = [file for package in _GLOSSARY_PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {word for file in files for word in re.findall(r"\w+", file.read_text())}


def test_every_row_is_read() -> None:
    head_rows = 2
    assert len(TERMS) == len(re.findall(r"^\|", _TEXT, re.MULTILINE)) - head_rows
    assert len(TERMS) > 40


def test_terms_are_sorted_and_explained_once() -> None:
    terms = [term for term, _ in TERMS]
    assert terms == sorted(set(terms))


def test_the_code_uses_every_term(words: set[str]) -> None:
    missing = [f"{term}: `{name}`" for term, name in TERMS if name not in words]
    assert not missing


NOTE = RunNote(before=bytes(16), tokens=array("i", [5, 0, 262_143]), tenant="Zoë", adapter="pirate")


def test_a_note_comes_back_as_it_was() -> None:
    cuts = ((16, b"k" * 16), (19, b"l" * 16))
    entry = SaveEntry(sequence_id=1, start=16, cuts=cuts[1:], release=False, note=NOTE)
    sent = encode_command(Save(entries=(entry,)), epoch=1)
    [received] = SAVE.decode(shard_pb2.SaveRequest.FromString(sent.SerializeToString())).entries
    positions, keys = zip(*received.cuts, strict=True)
    run = StoredRun(start=received.start, cuts=positions, keys=keys, size=7, note=received.kept_note)
    [message] = runs_responses([(run, True)])
    [listed] = saved_runs(shard_pb2.ListRunsResponse.FromString(message.SerializeToString()))
    assert listed == SavedRun(start=16, cuts=cuts[1:], size_bytes=7, on_disk=True, note=NOTE)


def test_the_tested_clients_have_their_pinned_versions() -> None:
    shown = re.search(r"^## Tested clients\n(.*?)^## ", DOCUMENTS["docs/http-api.md"], re.MULTILINE | re.DOTALL)
    assert shown is not None
    listed = set(re.findall(r"^\| [^|]+ \| (\d[\d.]+) \|", shown[1], re.MULTILINE))
    programs = ROOT / "tests/e2e/programs"
    agents, packages = (
        msgspec.json.decode((programs / folder / "package.json").read_text())["dependencies"]
        for folder in ("agents", "javascript")
    )
    pinned = {*agents.values(), packages["openai"], packages["ai"]}
    for file in programs.glob("*.txt"):
        pinned.add(re.findall(rf"^{file.stem}==(.*)$", file.read_text(), re.MULTILINE)[0])
    assert listed == pinned
