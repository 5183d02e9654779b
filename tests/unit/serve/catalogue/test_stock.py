"""What operators add: models of a hub, and models made of others."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from caravan_dialects.api.error_table import kind_of
from caravan_dialects.api.errors import RequestError
from caravan_dialects.api.ollama.errors import catalogue_errors
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.reference import parse_hub
from caravan_scheduler.core.catalogue import CatalogueError, MadeModel
from caravan_serve.catalogue import stock
from caravan_serve.catalogue.entries import CatalogueFileError
from caravan_serve.catalogue.stock import MadeFile


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (FetchProblem.DISK_FULL, 503),
        (FetchProblem.NO_NETWORK, 503),
        (FetchProblem.CACHE_UNUSABLE, 503),
        (FetchProblem.NO_REPOSITORY, 400),
        (FetchProblem.GATED, 400),
    ],
)
async def test_who_is_blamed_when_a_pull_fails(
    monkeypatch: pytest.MonkeyPatch, problem: FetchProblem, status: int
) -> None:
    async def fail(*_: object) -> None:
        raise FetchError(problem, "it fails")

    monkeypatch.setattr(stock, "fetch", fail)
    with pytest.raises(RequestError, match="it fails") as caught, catalogue_errors():
        async for _ in stock.pulled(parse_hub("owner/model:Q8_0")):
            pass
    assert kind_of(caught.value).status == status


def made(name: str, **recipe: object) -> MadeModel:
    return MadeModel(name, "owner/base:Q4_0", recipe, 5.0)


def test_what_is_made_is_there_for_the_next_server(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    assert MadeFile(folder).read() == {}
    assert MadeFile(folder).put(made("a", system="x")) == {"a": made("a", system="x")}
    MadeFile(folder).put(made("b"))
    MadeFile(folder).put(made("a", system="y"))
    assert MadeFile(folder).read() == {"a": made("a", system="y"), "b": made("b")}
    assert MadeFile(folder).remove("a") == {"b": made("b")}
    assert MadeFile(folder).remove("a") == {"b": made("b")}
    # Nothing is left of how it was written.
    assert {path.name for path in folder.iterdir()} == {"caravan-models.json", "caravan-models.lock"}


def test_changes_of_several_servers_are_all_kept(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: MadeFile(tmp_path).put(made(name)), names))
    assert set(MadeFile(tmp_path).read()) == set(names)


@pytest.mark.parametrize(
    "models",
    [
        "no list",
        [{"name": "../a", "base": "b", "recipe": {}, "made_s": 0}],
        [{"name": "a", "base": "b", "recipe": {"parameters": {"warmth": 1}}, "made_s": 0}],
        [{"name": "a", "base": "b", "recipe": {}}],
    ],
)
def test_a_file_that_says_something_else_is_left_as_it_is(tmp_path: Path, models: object) -> None:
    path = tmp_path / "caravan-models.json"
    path.write_text(json.dumps({"models": models}))
    with pytest.raises(CatalogueFileError, match=str(path)):
        MadeFile(tmp_path).read()
    with pytest.raises(CatalogueError) as refused:
        MadeFile(tmp_path).put(made("c"))
    assert str(tmp_path) not in str(refused.value)
    assert json.loads(path.read_text()) == {"models": models}
