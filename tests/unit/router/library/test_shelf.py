"""The names under which models are found."""

from dataclasses import replace

import pytest

from caravan_router.core.library import LibraryError, MadeModel
from caravan_router.engine.fleet import Fleet
from caravan_router.engine.link_config import LinkConfig
from caravan_router.metrics.recorder import Metrics
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.serve.library.entry import CatalogueEntry
from caravan_router.serve.library.shelf import Shelf


@pytest.fixture
async def shelf() -> Shelf:
    fleet = Fleet([], SchedulerConfig(), LinkConfig(router_id="test"), Metrics().of)
    entries = [CatalogueEntry(name="mine", source="mine.gguf", aliases=("gpt",)), pulled("owner/a:Q4_0")]
    stored = [MadeModel("poet", "mine", {}, 0.0), MadeModel("gpt", "mine", {}, 0.0), MadeModel("lost", "gone", {}, 0.0)]
    return Shelf(entries, fleet, {made.name: made for made in stored}, autoload=True)


def pulled(name: str) -> CatalogueEntry:
    return CatalogueEntry(name=name, source=f"hf:{name}", is_pulled=True)


def test_models_are_found_by_all_their_names(shelf: Shelf) -> None:
    for name in ("mine", "gpt", "poet"):
        assert shelf.slot(name).entry.name == "mine"
    with pytest.raises(LibraryError, match="no model 'lost'"):
        shelf.slot("lost")
    assert shelf.models()[0].aliases == ("gpt", "poet")


def test_what_was_made_of_a_model_is_there_once_that_is(shelf: Shelf) -> None:
    assert set(shelf.made) == {"poet"}
    shelf.add(pulled("gone"))
    assert set(shelf.made) == {"poet", "lost"}
    assert shelf.slot("lost").entry.name == "gone"


def test_a_repository_means_its_only_model(shelf: Shelf) -> None:
    assert shelf.slot("owner/a").entry.name == "owner/a:Q4_0"
    shelf.add(pulled("owner/a:Q8_0"))
    assert shelf.find("owner/a") is None
    shelf.take(shelf.slot("owner/a:Q4_0"))
    assert shelf.slot("owner/a").entry.name == "owner/a:Q8_0"


def test_a_name_that_is_taken_is_no_alias_of_what_comes(shelf: Shelf) -> None:
    shelf.add(replace(pulled("owner/b:Q4_0"), aliases=("mine", "poet", "b")))
    assert shelf.slot("owner/b:Q4_0").entry.aliases == ("b",)
