"""Prompt logprobs of real models, compared with those from the logits of llama-cpp-python's Llama."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.commands import PrefixCopy, RowOutputs
from caravan_proto.messages.limits import KvLayout
from caravan_testing.shard_builders import first_chunk, next_chunk, row, with_parameters
from caravan_testing.shard_models import (
    DEMO_MODEL,
    SMALL_WINDOW_MODEL,
    TIE_LOGITS,
    WINDOW_MODEL,
    WORDS_MODEL,
    ModelDriver,
    fetched,
)
from caravan_testing.shard_tiny_mamba import write_tiny_mamba

pytestmark = pytest.mark.model

TEXT = "The capital of France is Paris, and the capital of Italy is a city that was not built in a day."
LAYOUTS = pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)


def prompt_logprobs_of(
    driver: ModelDriver, tokens: Sequence[int], size: int, **sampling: Any
) -> tuple[list[float], list[int]]:
    """Return prompt logprobs and top ids of ``tokens``, in chunks of ``size`` while another sequence decodes."""
    driver.engine.release_all()
    driver.prefill(first_chunk(0, driver.tokens("A neighbour says"), ignore_eos=True))
    logprobs: list[float] = []
    top_ids: list[int] = []
    for start in range(0, len(tokens), size):
        part, last = tokens[start : start + size], start + size >= len(tokens)
        chunk = next_chunk(2, start, part, last=last)
        if start == 0:
            chunk = first_chunk(2, part, total=len(tokens), last=last, logprobs=True, **sampling)
            chunk = with_parameters(chunk, prompt_logprobs=True)
        rows = driver.prefill(chunk, riders=[0]).prompt_logprobs
        assert rows is not None
        assert (rows.sequence_ids, rows.counts) == ([2], [len(part)])
        logprobs += rows.logprobs
        top_ids += rows.top_token_ids
    return logprobs, top_ids


@cache
def exact_logprobs(model: Path, tokens: tuple[int, ...]) -> Any:
    """Return the log probabilities [tokens - 1, vocabulary] of Llama."""
    from llama_cpp import Llama

    llama = Llama(
        str(model), n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn=True, logits_all=True, verbose=False
    )
    llama.eval(list(tokens))
    logits = np.array(llama.scores[: len(tokens) - 1], np.float64)
    llama.close()
    return (
        logits
        - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        - logits.max(axis=1, keepdims=True)
    )


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mamba(tmp_path_factory.mktemp("model") / "tiny-mamba.gguf")


@pytest.fixture(params=["demo", "mamba"])
def model(request: pytest.FixtureRequest, mamba: Path) -> Path:
    """A model with a KV cache, then a recurrent one."""
    return DEMO_MODEL if request.param == "demo" else mamba


@LAYOUTS
def test_prompt_logprobs_equal_llamas(model: Path, layout: KvLayout) -> None:
    driver = ModelDriver(model, ctx_size=1024, kv_layout=layout.value)
    tokens = driver.tokens(TEXT)
    exact = exact_logprobs(model, tuple(tokens))
    expected = exact[np.arange(len(tokens) - 1), tokens[1:]]
    for size in (len(tokens), 5):
        logprobs, top_ids = prompt_logprobs_of(driver, tokens, size, top_n_tokens=1)
        assert np.isnan(logprobs[0])
        # Batches of different shapes round differently.
        np.testing.assert_allclose(logprobs[1:], expected, atol=TIE_LOGITS[DEMO_MODEL])
        assert np.abs(np.array(logprobs[1:]) - expected).mean() < TIE_LOGITS[DEMO_MODEL] / 5
        ties = exact.max(axis=1) - exact[np.arange(len(top_ids)), top_ids]
        assert ties.max() < TIE_LOGITS[DEMO_MODEL]
    driver.engine.close()


@pytest.mark.parametrize(
    "chosen",
    [pytest.param(WORDS_MODEL, id="words"), pytest.param(DEMO_MODEL, id="demo", marks=pytest.mark.slow)],
)
@LAYOUTS
def test_rows_behind_a_held_context_equal_llamas(chosen: Path, layout: KvLayout) -> None:
    driver = ModelDriver(fetched(chosen), ctx_size=1024, kv_layout=layout.value)
    tokens = driver.tokens(TEXT)
    exact = exact_logprobs(chosen, tuple(tokens))
    expected = exact[np.arange(len(tokens) - 1), tokens[1:]]
    driver.prefill(first_chunk(0, driver.tokens("A neighbour says"), ignore_eos=True))
    driver.evaluate(row(1, tokens[:10], outputs=RowOutputs.NONE))
    copy = PrefixCopy(source_id=1, length=10)
    for _ in range(2):
        found = driver.evaluate(
            row(2, tokens[10:], copy=copy, keep_length=0),
            row(3, tokens[10:15], copy=copy, score_token_ids=tokens[15:17], keep_length=0),
        )
        assert found.counts == [len(tokens) - 10, 5]
        # Batches of different shapes round differently.
        np.testing.assert_allclose(found.logprobs[: len(tokens) - 11], expected[10:], atol=driver.tie_logits)
        np.testing.assert_allclose(found.score_logprobs[-2:], exact[14, tokens[15:17]], atol=driver.tie_logits)
    driver.evaluate(row(3, tokens[10:15], copy=copy, outputs=RowOutputs.NONE))
    # The sequence grows by one token at a time, as a beam does, and is cut back.
    for place in (15, 16, 16):
        found = driver.evaluate(row(3, tokens[place : place + 1], place, score_token_ids=tokens[place + 1 : place + 2]))
        np.testing.assert_allclose(found.score_logprobs, exact[place, tokens[place + 1]], atol=driver.tie_logits)
        driver.evaluate(row(3, tokens[5:9], place + 1, outputs=RowOutputs.NONE, keep_length=min(place + 1, 16)))
    driver.decode([0])
    assert len(driver.output[0]) == 50
    driver.engine.close()


@pytest.mark.parametrize(
    ("model", "window", "rounding"),
    [
        pytest.param(SMALL_WINDOW_MODEL, 64, 0.01, id="small"),
        pytest.param(WINDOW_MODEL, 512, 0.5, id="gemma", marks=pytest.mark.slow),
    ],
)
def test_prompts_longer_than_a_window_have_prompt_logprobs(
    model: Path, window: int, rounding: float, record_property: Callable[[str, object], None]
) -> None:
    driver = ModelDriver(fetched(model), ctx_size=2048, kv_layout="unified")
    size = driver.backend.capacity.max_prompt_logprob_tokens
    tokens = driver.tokens(TEXT * 25)[: window + 48]
    logprobs, _ = prompt_logprobs_of(driver, tokens, size)
    for length in (7, window // 2, window + 43):
        driver.engine.release_all()
        driver.prefill_long(0, tokens[:length], max_new=1)
        logits = driver.backend.logits(1)[0].astype(np.float64)
        expected = logits[tokens[length]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        record_property(f"error_{length}", float(abs(logprobs[length] - expected)))
        assert logprobs[length] == pytest.approx(expected, abs=rounding), length
    driver.engine.close()
