"""Shards that load onto GPUs take turns."""

import logging
import threading
from pathlib import Path

import pytest

from caravan_shard.service.loading import gpu_turn

DEADLINE_S = 60


def test_the_second_waits_until_the_first_has_loaded(tmp_path: Path) -> None:
    waiting, entered, first_ended = threading.Event(), threading.Event(), threading.Event()
    order: list[bool] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for another shard" in record.getMessage():
                waiting.set()

    def load() -> None:
        with gpu_turn(tmp_path):
            order.append(first_ended.is_set())
            entered.set()

    log = logging.getLogger("caravan_shard.service.loading")
    watch, level = Watch(), log.level
    log.addHandler(watch)
    log.setLevel(logging.INFO)
    try:
        with gpu_turn(tmp_path):
            second = threading.Thread(target=load, daemon=True)
            second.start()
            assert waiting.wait(DEADLINE_S)
            assert not entered.is_set()
            first_ended.set()
        assert entered.wait(DEADLINE_S)
        second.join(DEADLINE_S)
    finally:
        log.removeHandler(watch)
        log.setLevel(level)
    assert order == [True]
    assert (next(tmp_path.iterdir()).stat().st_mode & 0o777) == 0o600


def test_the_turn_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), gpu_turn(tmp_path):
        raise ValueError("broken")
    with gpu_turn(tmp_path):
        pass


def test_without_a_place_for_the_lock_a_shard_starts_nevertheless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = False
    with gpu_turn(tmp_path / "missing"):
        loaded = True
    assert loaded
    assert "may see the same memory" in caplog.text
