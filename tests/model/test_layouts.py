"""States and contexts in both layouts, on models with random weights and on real ones, which are slow tests."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_shard.backends.base import CellSlice
from caravan_testing.shard_builders import first_chunk
from caravan_testing.shard_models import (
    DEMO_MODEL,
    HYBRID_MODEL,
    PLAIN_MODEL,
    SMALL_WINDOW_MODEL,
    WINDOW_MODEL,
    ModelDriver,
    fetched,
)
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama

pytestmark = pytest.mark.model

NEW_TOKENS = 10
# Of tests that run on one of them.
MODELS = [
    pytest.param(PLAIN_MODEL, id="plain"),
    pytest.param(DEMO_MODEL, id="demo", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("model", "cells"),
    [
        pytest.param(PLAIN_MODEL, 256, id="plain"),
        pytest.param(SMALL_WINDOW_MODEL, 256, id="window"),
        pytest.param(DEMO_MODEL, 256, id="demo", marks=pytest.mark.slow),
        pytest.param(WINDOW_MODEL, 768, id="gemma", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("layout", ["unified", "split"])
def test_a_state_that_does_not_fit_is_neither_saved_nor_restored(model: Path, cells: int, layout: str) -> None:
    driver = ModelDriver(fetched(model), ctx_size=cells, kv_layout=layout, parallel=4 if layout == "unified" else 1)
    words = driver.tokens("word " * cells)[: cells - 90]
    driver.prefill_long(0, words[:100], max_new=1)
    assert driver.backend.save(0, 0, 100, 1_000, releasing=False) is None
    assert driver.backend.length(0) == 100
    state = driver.backend.save(0, 10, 100, 1 << 30, releasing=False)
    whole = driver.backend.save(0, 0, 100, 1 << 30, releasing=True)
    assert state is not None
    assert whole is not None
    driver.engine.release_all()
    parts = [CellSlice(state=whole, first=0, start=0, end=50), CellSlice(state=state, first=10, start=50, end=90)]
    # Damaged: a state without one of the cells, one of another model, and one that ends early.
    for bad in (state, state[:-1], np.zeros(100, np.uint8)):
        assert not driver.backend.restore(0, [CellSlice(state=bad, first=0, start=0, end=50)])
        assert driver.backend.length(0) == 0
    if layout == "unified":
        driver.prefill_long(1, words, max_new=1)
        assert driver.backend.restore(0, parts)
        driver.backend.trim(0, 0)
        driver.prefill(first_chunk(2, words[:1], max_new=1))
        assert not driver.backend.restore(0, parts)
        assert driver.backend.length(0) == 0
        driver.prefill(first_chunk(0, words[:89], max_new=1))
    else:
        assert driver.backend.restore(0, parts)
        assert driver.backend.length(0) == 90
    driver.engine.close()


@pytest.mark.parametrize("model", [PLAIN_MODEL, SMALL_WINDOW_MODEL, HYBRID_MODEL], ids=["plain", "window", "hybrid"])
@pytest.mark.parametrize("layout", ["unified", "split"])
def test_sequences_go_on_when_free_cells_are_cleared(model: Path, layout: str) -> None:
    driver = ModelDriver(fetched(model), ctx_size=1024, kv_layout=layout, flash_attn="off")
    tokens, tail = driver.tokens("a prompt for a model that reads it once"), driver.tokens(" and a tail")[1:]
    expected, expected_tail = driver.alone(tokens, NEW_TOKENS), driver.alone(tokens + tail, NEW_TOKENS)
    driver.prefill(first_chunk(0, tail, max_new=1))
    driver.prefill(first_chunk(1, tokens, max_new=NEW_TOKENS))
    driver.prefill(first_chunk(3, tail, max_new=NEW_TOKENS, copy=PrefixCopy(source_id=1, length=len(tokens))))
    driver.backend.trim(0, 0)
    driver.backend.clear_free_cells()
    driver.decode([1, 3])
    assert (driver.output[1], driver.output[3]) == (expected, expected_tail)
    driver.engine.close()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flash_attn", ["auto", "off"])
def test_states_move_between_layouts(model: Path, flash_attn: str) -> None:
    driver = ModelDriver(fetched(model), ctx_size=2048, flash_attn=flash_attn)
    prompt = driver.tokens("The values are transposed, or not, and nobody can tell from the outside.")
    expected = driver.alone(prompt, NEW_TOKENS)
    driver.prefill_long(0, prompt, max_new=NEW_TOKENS)
    for layout in (KvLayout.UNIFIED, KvLayout.SPLIT):
        driver.decode([0], steps=2)
        assert driver.set_layout(layout) == []
    driver.decode([0])
    driver.check_same(prompt, expected, driver.output[0])
    driver.engine.close()


@pytest.mark.parametrize("model", [*MODELS, pytest.param(SMALL_WINDOW_MODEL, id="window")])
def test_equal_beginnings_are_shared_where_the_layout_lets_them_be(model: Path) -> None:
    driver = ModelDriver(fetched(model), ctx_size=4096, flash_attn="on")
    common = driver.tokens("The values are transposed, or not, and nobody can tell from the outside. " * 4)
    prompts = [common + driver.tokens(end) for end in (" One more thing: " * 12, " Two", " Three")]
    expected = [driver.alone(prompt, NEW_TOKENS) for prompt in prompts]
    for key, prompt in enumerate(prompts):
        driver.prefill_long(key, prompt, max_new=NEW_TOKENS)
    driver.decode([0, 1, 2], steps=2)
    used = driver.engine.free_cells
    assert driver.set_layout(KvLayout.UNIFIED) == []
    assert driver.engine.free_cells >= used + 2 * len(common)
    driver.decode([0, 1, 2])
    for prompt, each, key in zip(prompts, expected, range(3), strict=True):
        driver.check_same(prompt, each, driver.output[key])
    driver.engine.close()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("flags", "flash"),
    [
        ({}, {"split": True, "unified": True}),
        ({"flash_attn": "on"}, {"split": True, "unified": True}),
        ({"flash_attn": "off"}, {"split": False, "unified": False}),
        ({"cache_type_v": "q8_0"}, {"split": True, "unified": True}),
        ({"kv_layout": "unified"}, {"unified": True}),
    ],
    ids=str,
)
def test_flags_alone_decide_about_flash_attention(
    model: Path, flags: dict[str, Any], flash: dict[str, bool], tmp_path: Path
) -> None:
    if model == PLAIN_MODEL:
        # Values are quantized in blocks of 32, and that model's heads have 16.
        model = write_tiny_llama(tmp_path / "wide-heads.gguf", Shape(heads=2))
    found = []
    for _ in range(2):
        driver = ModelDriver(fetched(model), **{"ctx_size": 1024, "flash_attn": "auto", **flags})
        found.append(driver.backend.numerics)
        driver.engine.close()
    assert found[0] == found[1]
    assert found[0].flash_attention == flash


def test_a_layout_that_cannot_be_made_keeps_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ModelDriver(fetched(PLAIN_MODEL), ctx_size=1024)
    contexts = driver.backend._contexts
    prompt = driver.tokens("This context is made once more.")
    expected = driver.alone(prompt, 8)
    driver.prefill_long(0, prompt, max_new=8)
    driver.decode([0], steps=2)
    make = contexts.open
    monkeypatch.setattr(contexts, "open", lambda layout: make(layout) if layout is KvLayout.SPLIT else None)
    assert driver.set_layout(KvLayout.UNIFIED) == []
    assert driver.backend.capacity.current.layout is KvLayout.SPLIT
    driver.decode([0])
    assert driver.output[0] == expected
    monkeypatch.setattr(contexts, "open", lambda _layout: None)
    with pytest.raises(RuntimeError, match="no context"):
        driver.set_layout(KvLayout.UNIFIED)
    # A sequence is still held, of a context that is gone.
    assert driver.engine.sequence_count == 1
    driver.engine.close()
