"""Models come from a hub into huggingface_hub's cache, whatever happens on the way."""

import hashlib
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import huggingface_hub
import pytest

from caravan_models.cached_model import FetchedModel
from caravan_models.download import download
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.hub import HubSettings
from caravan_models.progress import FetchStage, Progress, ignore_progress
from caravan_models.reference import HubModel, KnownModel, LocalFile, parse_reference
from caravan_testing.stand_in_hub import COMMIT, Content, StandInHub, small_gguf
from caravan_testing.waiting import DEADLINE_S

MODEL = small_gguf(300_000)
NAME = "hf:demo/small:Q4_0"


def got(settings: HubSettings, text: str = NAME, progress: list[Progress] | None = None) -> FetchedModel:
    reference = parse_reference(text)
    assert not isinstance(reference, LocalFile)
    return download(reference, settings, ignore_progress if progress is None else progress.append)


def starts(hub: StandInHub) -> list[int]:
    """The first byte that each transfer asked for."""
    return [int(seen.headers["range"].removeprefix("bytes=").partition("-")[0]) for seen in hub.transfers]


def partials(cache: Path) -> list[Path]:
    return list(cache.rglob("*.incomplete"))


def check_growing(progress: list[Progress]) -> None:
    """Check that no count gets smaller, and that the last one is whole."""
    for before, after in pairwise(progress):
        assert after.done >= before.done
        assert after.file != before.file or after.file_done >= before.file_done
    assert progress[-1].done == progress[-1].size


def test_a_model_comes_into_the_cache_by_its_name(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL, "small-Q8_0.gguf": small_gguf(seed=8), "README.md": b"words"})
    progress: list[Progress] = []
    found = got(settings, progress=progress)
    assert found.model.read_bytes() == MODEL
    assert found.parts == (found.model,)
    assert (found.name, found.size, found.projector) == ("demo/small:Q4_0", len(MODEL), None)
    assert found.digest == hashlib.sha256(MODEL).hexdigest()
    assert [seen.path for seen in hub.transfers] == [f"/{found.digest}?signature=once"]
    check_growing(progress)
    assert progress[-1].stage is FetchStage.CHECKING


def test_storage_never_sees_the_token(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL}, private=True)
    got(settings)
    of_hub = [seen for seen in hub.seen if not seen.of_storage]
    assert of_hub
    assert all("authorization" in seen.headers for seen in of_hub)
    assert not any("authorization" in seen.headers for seen in hub.transfers)


def test_what_is_there_is_not_downloaded_again(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    first = got(settings)
    progress: list[Progress] = []
    assert got(settings, progress=progress) == first
    assert got(settings, f"{NAME}@{COMMIT}").model == first.model
    assert len(hub.transfers) == 1
    assert progress == []


def test_programs_with_the_same_cache_find_the_model(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"a/small-Q4_0.gguf": MODEL})
    found = got(settings)
    path = "a/small-Q4_0.gguf"
    assert huggingface_hub.try_to_load_from_cache("demo/small", path, cache_dir=settings.cache) == str(found.model)
    loaded = huggingface_hub.hf_hub_download(
        "demo/small", path, cache_dir=settings.cache, endpoint=hub.url, token=settings.token
    )
    assert loaded == str(found.model)
    assert len(hub.transfers) == 1
    info = huggingface_hub.scan_cache_dir(settings.cache)
    assert (info.warnings, len(info.incomplete_files), info.size_on_disk) == ([], 0, len(MODEL))
    [repository] = info.repos
    assert repository.refs.keys() == {"main"}


def test_a_model_of_another_program_is_used(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    path = huggingface_hub.hf_hub_download(
        "demo/small", "small-Q4_0.gguf", cache_dir=settings.cache, endpoint=hub.url, token=settings.token
    )
    before = len(hub.transfers)
    found = got(settings)
    assert (str(found.model), found.digest) == (path, hashlib.sha256(MODEL).hexdigest())
    assert len(hub.transfers) == before


def test_a_small_file_that_is_in_git_itself_is_checked_by_its_sha1(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": Content(MODEL, lfs=False)})
    found = got(settings)
    assert found.model.read_bytes() == MODEL
    assert found.digest == ""


def test_parts_come_in_order_and_the_projector_with_them(hub: StandInHub, settings: HubSettings) -> None:
    parts = [small_gguf(5000 + number, seed=number) for number in range(3)]
    files = {f"Q4_0/big-Q4_0-{number:05}-of-00003.gguf": part for number, part in enumerate(parts, 1)}
    files |= {"mmproj-F16.gguf": small_gguf(seed=9, architecture="clip"), "mmproj-F32.gguf": small_gguf(seed=10)}
    hub.add("demo/small", dict(reversed(files.items())))
    progress: list[Progress] = []
    found = got(settings, progress=progress)
    assert [part.read_bytes() for part in found.parts] == parts
    assert found.model == found.parts[0]
    assert found.projector is not None
    assert found.projector.name == "mmproj-F16.gguf"
    assert found.size == sum(map(len, parts)) + 4096
    digests = "".join(hashlib.sha256(part).hexdigest() for part in parts)
    assert found.digest == hashlib.sha256(digests.encode()).hexdigest()
    check_growing(progress)


def test_a_known_name_is_a_place_on_the_hub(hub: StandInHub, settings: HubSettings) -> None:
    known = parse_reference("gemma3:270m")
    assert isinstance(known, KnownModel)
    hub.add(known.source.repository, {"gemma-3-270m-it-Q4_K_M.gguf": MODEL, "gemma-3-270m-it-BF16.gguf": MODEL})
    found = got(settings, "gemma3:270m")
    assert (found.name, found.model.name) == ("gemma3:270m", "gemma-3-270m-it-Q4_K_M.gguf")


def test_a_transfer_that_is_cut_off_continues(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    hub.faults.cut_after = [100_000, 50_000, 0]
    hub.faults.storage_statuses = [503]
    progress: list[Progress] = []
    assert got(settings, progress=progress).model.read_bytes() == MODEL
    assert starts(hub) == [0, 0, 100_000, 150_000, 150_000]
    check_growing(progress)


def test_a_silent_server_is_left_and_asked_again(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    hub.faults.stall_after = [100_000]
    assert got(replace(settings, silence_s=2.0)).model.read_bytes() == MODEL
    # A slow machine may take a moment without bytes for silence, too.
    assert starts(hub)[:2] == [0, 100_000]


def test_an_earlier_process_that_was_interrupted_is_continued(
    hub: StandInHub, settings: HubSettings, cache: Path
) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    hub.faults.cut_after = [100_000, 0, 0, 0, 0]
    with pytest.raises(FetchError, match=r"cut off after 100\.0 kB of 300\.0 kB") as failed:
        got(settings)
    assert failed.value.problem is FetchProblem.CUT_OFF
    [partial] = partials(cache)
    assert partial.read_bytes() == MODEL[:100_000]
    hub.faults.cut_after = []
    hub.seen.clear()
    progress: list[Progress] = []
    assert got(settings, progress=progress).model.read_bytes() == MODEL
    assert starts(hub) == [100_000]
    assert progress[0].done == 100_000
    check_growing(progress)
    assert partials(cache) == []


def test_a_server_that_knows_no_ranges_is_read_from_the_start(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    hub.faults.cut_after = [100_000]
    hub.faults.ignores_ranges = True
    progress: list[Progress] = []
    assert got(settings, progress=progress).model.read_bytes() == MODEL
    check_growing(progress)


def test_bytes_that_were_damaged_here_are_fetched_again(hub: StandInHub, settings: HubSettings, cache: Path) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    hub.faults.cut_after = [100_000, 0, 0, 0, 0]
    with pytest.raises(FetchError):
        got(settings)
    [partial] = partials(cache)
    partial.write_bytes(MODEL[:50_000] + bytes(50_000))
    hub.faults.cut_after = []
    progress: list[Progress] = []
    assert got(settings, progress=progress).model.read_bytes() == MODEL
    check_growing(progress)


def test_a_file_has_its_name_only_after_it_was_checked(hub: StandInHub, settings: HubSettings, cache: Path) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    sha256 = hashlib.sha256(MODEL).hexdigest()
    named = []

    def look(_progress: Progress) -> None:
        named.append(any(path.name in {sha256, "small-Q4_0.gguf"} for path in cache.rglob("*")))

    download(HubModel("demo/small"), settings, look)
    assert named
    assert not any(named)
    hub.faults.damaged_transfers = 1
    other = replace(settings, cache=cache / "other")
    with pytest.raises(FetchError, match="damaged on its way"):
        got(other)
    assert [path for path in other.cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    assert got(other).model.read_bytes() == MODEL


def test_of_two_that_want_one_file_one_downloads_it(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    hub.faults.stall_after = [100_000]
    first, second = list[Progress](), list[Progress]()
    told, waiting = threading.Event(), threading.Event()

    def note_first(progress: Progress) -> None:
        first.append(progress)
        if progress.done >= 100_000:
            told.set()

    def note(progress: Progress) -> None:
        second.append(progress)
        if progress.stage is FetchStage.WAITING and progress.done >= 100_000:
            waiting.set()

    slow = replace(settings, silence_s=60.0)
    reference = HubModel("demo/small")
    downloading = threading.Thread(target=download, args=(reference, slow, note_first))
    downloading.start()
    assert told.wait(DEADLINE_S)
    also = threading.Thread(target=download, args=(reference, slow, note))
    also.start()
    assert waiting.wait(DEADLINE_S)
    hub.release_stalled()
    downloading.join(DEADLINE_S)
    also.join(DEADLINE_S)
    assert starts(hub) == [0, 100_000]
    check_growing(first)
    check_growing(second)


def test_a_newer_commit_is_fetched_and_the_same_file_only_linked(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    first = got(settings)
    hub.commit = "6b" * 20
    second = got(settings)
    assert second.model != first.model
    assert second.model.resolve() == first.model.resolve()
    assert len(hub.transfers) == 1
    hub.repositories["demo/small"].files["small-Q4_0.gguf"] = Content(small_gguf(seed=3))
    hub.commit = "7c" * 20
    assert got(settings).model.read_bytes() == small_gguf(seed=3)
    assert first.model.read_bytes() == MODEL


def test_without_a_network_the_cache_is_enough(hub: StandInHub, settings: HubSettings) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    first = got(settings)
    hub.seen.clear()
    assert got(replace(settings, offline=True)) == first
    assert hub.seen == []
    unreachable = got(replace(settings, endpoint="http://127.0.0.1:1"))
    assert unreachable.model == first.model
    assert "cannot reach http://127.0.0.1:1" in unreachable.note
    hub.faults.api_statuses = [500] * settings.tries
    assert "fails with status 500" in got(settings).note
    hub.faults.api_statuses = [500] * (settings.tries - 1)
    assert got(settings).note == ""
