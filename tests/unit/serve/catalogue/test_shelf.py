"""The models of a catalogue by name, and their downloads."""

import asyncio
from dataclasses import replace

import pytest

from caravan_router.engine.fleet import Fleet
from caravan_router.engine.link_config import LinkConfig
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.catalogue import CatalogueError, Download, MadeModel, ModelState, StateChange
from caravan_serve.catalogue.entries import CatalogueEntry
from caravan_serve.catalogue.shelf import Downloads, Shelf


def test_a_download_is_under_way_from_its_first_note_to_its_end() -> None:
    told: list[str] = []
    downloads = Downloads(told.append)
    with downloads.of("a") as note:
        assert downloads.find("a") is None
        assert told == []
        note(Download(0, 10))
        note(Download(4, 10))
        assert downloads.find("a") == Download(4, 10)
        assert downloads.names == ["a"]
    assert downloads.find("a") is None
    assert told == ["a", "a", "a"]


def test_downloads_of_one_model_are_told_of_as_one_that_never_goes_back() -> None:
    downloads = Downloads(lambda _: None)
    with downloads.of("a") as first, downloads.of("b") as other:
        first(Download(4, 10))
        other(Download(9, 9))
        with downloads.of("a") as second:
            second(Download(2, 10))
            assert downloads.find("a") == Download(4, 10)
            second(Download(6, 10))
            assert downloads.find("a") == Download(6, 10)
        assert downloads.names == ["a", "b"]


def test_what_needs_no_download_is_not_told() -> None:
    told: list[str] = []
    with Downloads(told.append).of("a"):
        pass
    assert told == []


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
    with pytest.raises(CatalogueError, match="no model 'lost'"):
        shelf.slot("lost")
    assert shelf.models()[0].aliases == ("gpt", "poet")


def test_what_was_made_of_a_model_is_there_once_that_is(shelf: Shelf) -> None:
    assert set(shelf.made) == {"poet"}
    shelf.add(pulled("gone"))
    assert set(shelf.made) == {"poet", "lost"}
    assert shelf.slot("lost").entry.name == "gone"


def test_a_repository_means_its_only_model_or_the_usual_one(shelf: Shelf) -> None:
    assert shelf.slot("owner/a").entry.name == "owner/a:Q4_0"
    shelf.add(pulled("owner/a:Q8_0"))
    assert shelf.find("owner/a") is None
    shelf.add(pulled("owner/a:Q4_K_M"))
    assert shelf.slot("owner/a").entry.name == "owner/a:Q4_K_M"
    shelf.take(shelf.slot("owner/a:Q4_K_M"))
    assert shelf.find("owner/a") is None
    shelf.take(shelf.slot("owner/a:Q4_0"))
    assert shelf.slot("owner/a").entry.name == "owner/a:Q8_0"


def test_a_name_that_is_taken_is_no_alias_of_what_comes(shelf: Shelf) -> None:
    shelf.add(replace(pulled("owner/b:Q4_0"), aliases=("mine", "poet", "b")))
    assert shelf.slot("owner/b:Q4_0").entry.aliases == ("b",)


async def test_whoever_watches_is_told_how_far_downloads_are(shelf: Shelf) -> None:
    changes = shelf.changes()
    first = asyncio.create_task(anext(changes))
    # The watcher is there once its task has begun to wait.
    await asyncio.sleep(0)
    with shelf.downloads.of("owner/c:Q4_0") as note, shelf.downloads.of("mine") as note_mine:
        note(Download(1, 8))
        assert [model.name for model in shelf.arriving()] == ["owner/c:Q4_0"]
        note_mine(Download(2, 9))
        assert shelf.models()[0].state is ModelState.DOWNLOADING
    told = [await first, *[await anext(changes) for _ in range(3)]]
    await changes.aclose()
    assert told == [
        StateChange("owner/c:Q4_0", ModelState.DOWNLOADING, download=Download(1, 8)),
        StateChange("mine", ModelState.DOWNLOADING, download=Download(2, 9)),
        StateChange("mine", ModelState.UNLOADED),
        StateChange("owner/c:Q4_0", None),
    ]
    assert shelf.arriving() == []
