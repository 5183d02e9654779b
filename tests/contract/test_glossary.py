"""The glossary explains words that the code uses."""

import re

import pytest
from doc_tables import ROOT

_ROW = re.compile(r"^\| ([^|]+) \| `([^`|]+)` \| ([^|]+) \|$", re.MULTILINE)
_TEXT = (ROOT / "docs/glossary.md").read_text()
TERMS = [(match[1], match[2]) for match in _ROW.finditer(_TEXT)]
_PACKAGES = (
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
    files = [file for package in _PACKAGES for file in (ROOT / package).rglob("*.py")]
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
