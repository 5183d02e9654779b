"""What the documents say of the program is what the program says of itself."""

import re

import comparisons
import doc_tables
import pytest
from doc_tables import ROOT

from caravan_dialects.api.errors import TABLE, RequestError
from caravan_proto.shard.v1 import shard_pb2
from caravan_router.http.routes import ROUTES
from caravan_scheduler.core.errors import EngineError

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
    most_words = 720
    assert len(DOCUMENTS["README.md"].split()) < most_words
