"""Where no hub can be asked, the demo model is served under its name, and errors for other names lead to it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from caravan_models import cached_model
from caravan_models.cached_model import DEMO_FILE, DEMO_NAME, FetchedModel, demo_file
from caravan_models.download import download
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.hub import HubSettings
from caravan_models.progress import ignore_progress
from caravan_models.reference import LocalFile, parse_reference
from caravan_testing.stand_in_hub import StandInHub, small_gguf

_ROOT = Path(__file__).parents[3]
_REPOSITORY = "bartowski/SmolLM2-135M-Instruct-GGUF"
_ADVICE = "plain `make run` serves a demo model that needs no hub"

Unreachable = Callable[[StandInHub, HubSettings], HubSettings]


@pytest.fixture
def settings(settings: HubSettings, tmp_path: Path) -> HubSettings:
    """Settings with a demo model."""
    file = tmp_path / DEMO_FILE
    file.write_bytes(small_gguf(seed=3))
    return replace(settings, demo_file=file)


def got(settings: HubSettings, text: str = DEMO_NAME) -> FetchedModel:
    reference = parse_reference(text)
    assert not isinstance(reference, LocalFile)
    return download(reference, settings, ignore_progress)


def nobody_listens(_hub: StandInHub, settings: HubSettings) -> HubSettings:
    return replace(settings, endpoint="http://127.0.0.1:1")


def is_offline(_hub: StandInHub, settings: HubSettings) -> HubSettings:
    return replace(settings, offline=True)


def fails(hub: StandInHub, settings: HubSettings) -> HubSettings:
    hub.faults.api_statuses = [503] * 9
    return settings


def is_no_hub(hub: StandInHub, settings: HubSettings) -> HubSettings:
    hub.faults.api_body = b"<html></html>"
    return settings


unreachable = pytest.mark.parametrize("unreachable", [nobody_listens, is_offline, fails, is_no_hub])


@unreachable
def test_the_demo_model_is_served_where_no_hub_can_be_asked(
    unreachable: Unreachable, hub: StandInHub, settings: HubSettings
) -> None:
    found = got(unreachable(hub, settings))
    assert found.model == settings.demo_file
    assert found.parts == (found.model,)
    assert (found.name, found.size) == (DEMO_NAME, found.model.stat().st_size)
    assert found.note.endswith(f". Using the demo model instead: {found.model}")
    assert "\n" not in found.note


@unreachable
@pytest.mark.parametrize("text", ["smollm2", f"hf:{_REPOSITORY}:Q4_K_M", "hf:demo/small"])
def test_errors_for_other_names_lead_to_the_demo_model(
    text: str, unreachable: Unreachable, hub: StandInHub, settings: HubSettings
) -> None:
    with pytest.raises(FetchError, match=_ADVICE):
        got(unreachable(hub, settings), text)


def test_without_the_file_the_error_stands(hub: StandInHub, settings: HubSettings) -> None:
    with pytest.raises(FetchError, match=rf"cannot reach http://127.0.0.1:1: .*{_ADVICE}") as failed:
        got(nobody_listens(hub, replace(settings, demo_file=None)))
    assert failed.value.problem is FetchProblem.NO_NETWORK


def test_what_a_hub_has_comes_first_and_then_what_the_cache_has(hub: StandInHub, settings: HubSettings) -> None:
    hub.add(_REPOSITORY, {"SmolLM2-135M-Instruct-Q4_K_M.gguf": small_gguf(seed=4)})
    of_hub = got(settings)
    assert (of_hub.model.read_bytes(), of_hub.note) == (small_gguf(seed=4), "")
    of_cache = got(nobody_listens(hub, settings))
    assert of_cache.model == of_hub.model
    assert "Using what the cache has" in of_cache.note


def test_an_answer_of_the_hub_is_no_reason_for_the_demo_model(settings: HubSettings) -> None:
    with pytest.raises(FetchError, match="has no repository") as failed:
        got(settings)
    assert "make run" not in str(failed.value)


def test_the_file_is_that_of_the_checkout_or_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_model, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(cached_model, "_PACKAGE", "a_package_with_the_demo_model")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert demo_file() is None
    of_package = tmp_path / "a_package_with_the_demo_model" / DEMO_FILE
    of_package.parent.mkdir()
    (of_package.parent / "__init__.py").write_text("raise AssertionError('it is not imported')")
    assert demo_file() is None
    of_package.write_bytes(small_gguf())
    assert demo_file() == of_package
    of_checkout = tmp_path / ".cache" / "models" / DEMO_FILE
    of_checkout.parent.mkdir(parents=True)
    of_checkout.write_bytes(small_gguf())
    assert demo_file() == of_checkout


def test_make_puts_the_file_where_it_is_looked_for() -> None:
    lines = (_ROOT / "Makefile").read_text().splitlines()
    assert f"DEMO_MODEL := .cache/models/{DEMO_FILE}" in lines
    assert f"MODEL_FILE += $(if $(filter {DEMO_NAME},$(MODEL)),$(DEMO_MODEL))" in lines
    assert cached_model._CHECKOUT == _ROOT
