"""What `caravan serve` prints once it is ready, and what the first Ctrl-C says."""

import asyncio
import logging
import os
import shlex
import signal
from dataclasses import replace

import pytest

from caravan_router.cli import stop_on_signals
from caravan_router.config import RouterConfig
from caravan_scheduler.core.engine import ModelFacts
from caravan_serve.cli import announcement
from caravan_testing.scripted_engine import MODEL, ScriptedEngine

URL = "http://127.0.0.1:3000"


def announced(model: ModelFacts, config: RouterConfig) -> list[str]:
    """Return the lines of the announcement."""
    return announcement(ScriptedEngine(model=model), URL, config).strip("\n").splitlines()  # type: ignore[arg-type]


def test_five_lines_say_what_is_served_and_where() -> None:
    ready, model, page, apis, curl = announced(MODEL, RouterConfig())
    assert ready == f"Caravan is ready on {URL}"
    assert model.split()[:2] == ["model", f"{MODEL.name},"]
    assert f"{MODEL.max_sequence_tokens:,} tokens" in model
    assert page.split() == ["page", f"{URL}/"]
    assert f"{URL}/docs" in apis
    assert shlex.split(curl)[:3] == ["curl", "-N", f"{URL}/generate_stream"]


def test_each_model_has_a_line() -> None:
    other = replace(MODEL, name="another")
    engine = ScriptedEngine(model=MODEL, others=[ScriptedEngine(model=other)])
    lines = announcement(engine, URL, RouterConfig()).splitlines()  # type: ignore[arg-type]
    assert [line.split()[1] for line in lines if line.startswith("  model")] == [f"{MODEL.name},", "another,"]


def test_the_request_is_one_that_the_model_answers() -> None:
    assert f"{URL}/v1/embeddings" in announced(replace(MODEL, generates=False), RouterConfig())[-1]
    assert f"{URL}/v1/rerank" in announced(replace(MODEL, generates=False, ranks=True), RouterConfig())[-1]


def test_keys_and_a_missing_page_are_shown() -> None:
    lines = announced(MODEL, RouterConfig(api_keys_file="keys.toml", page=False))
    assert lines[2].split() == ["page", "off"]
    assert '-H "Authorization: Bearer $KEY"' in lines[-1]


async def test_the_first_ctrl_c_says_what_a_second_one_does(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    stop = stop_on_signals()
    try:
        with caplog.at_level(logging.INFO, logger="caravan_router.cli"):
            os.kill(os.getpid(), signal.SIGINT)
            await stop.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    assert "press Ctrl-C again to end at once" in caplog.text
