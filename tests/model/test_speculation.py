"""Drafts on llama.cpp: the same tokens in fewer steps."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from caravan_proto.messages.sampling import SamplingParams
from caravan_testing.shard_builders import first_chunk, with_parameters
from caravan_testing.shard_models import DEMO_MODEL, SMALL_WINDOW_MODEL, WINDOW_MODEL, WORDS_MODEL, ModelDriver, fetched

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

PROMPTS = (
    "def fibonacci(n):\n",
    "Once upon a time there was a small dragon that",
)
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=3),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, seed=4),
)
NEW = 40
# Of tests that run on one of them.
MODELS = [
    pytest.param(WORDS_MODEL, id="words"),
    pytest.param(DEMO_MODEL, id="demo", marks=pytest.mark.slow),
]


def corrupted(output: Sequence[int], share: float) -> tuple[int, ...]:
    """Replace a ``share`` of the tokens."""
    source = random.Random(f"{share}")
    return tuple(source.randrange(100, 40_000) if source.random() < share else token for token in output)


def outputs(driver: ModelDriver, predictions: Sequence[Sequence[int]] | None) -> tuple[list[list[int]], int]:
    """Return the outputs of all prompts with all samplings, one sequence at a time, and the number of steps."""
    found, steps = [], 0
    for number, (prompt, sampling) in enumerate((prompt, one) for prompt in PROMPTS for one in SAMPLINGS):
        tokens = driver.backend.vocabulary.tokenize(prompt, add_special=True, parse_special=False)
        chunk = first_chunk(0, tokens, max_new=NEW, ignore_eos=True, sampling=sampling)
        if predictions is not None:
            chunk = with_parameters(chunk, max_draft_tokens=6, prediction=tuple(predictions[number]))
        driver.prefill(chunk)
        steps += len(driver.decode([0], max_draft_tokens=16))
        found.append(driver.output[0])
        driver.keep()
    return found, steps


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flags", [{"exact": True}, {"flash_attn": "on"}, {"flash_attn": "off"}], ids=str)
def test_where_chunks_compute_the_same_bits_drafts_change_no_token(model: Path, flags: dict[str, Any]) -> None:
    """Sequences have 256 cells, so that no more are compared at the start."""
    driver = ModelDriver(fetched(model), ctx_size=2048, kv_layout="split", **flags)
    assert driver.engine.free_cells == 2048
    assert driver.first_position(0) == -1
    same = driver.backend.numerics.same_in_chunks
    assert same or "exact" not in flags
    plain, steps = outputs(driver, None)
    drafted, fewer = outputs(driver, [corrupted(output, 0.1) for output in plain])
    if same:
        assert drafted == plain
    # Behind a token that differs, what was predicted is no draft any more.
    if drafted == plain:
        assert fewer < 0.7 * steps
    driver.engine.close()


@pytest.mark.parametrize("model", MODELS)
def test_without_flash_attention_drafts_change_tokens_only_at_ties(model: Path) -> None:
    driver = ModelDriver(fetched(model), ctx_size=2048, kv_layout="split", flash_attn="off")
    for prompt in PROMPTS:
        tokens = driver.tokens(prompt)
        plain = driver.alone(tokens, NEW)
        chunk = first_chunk(0, tokens, max_new=NEW, ignore_eos=True)
        driver.prefill(with_parameters(chunk, max_draft_tokens=6, prediction=corrupted(plain, 0.3)))
        driver.decode([0], max_draft_tokens=16)
        driver.check_same(tokens, plain, driver.output[0])
        driver.engine.release_all()
    driver.engine.close()


@pytest.mark.parametrize(
    ("model", "window"),
    [
        pytest.param(SMALL_WINDOW_MODEL, 64, id="small"),
        pytest.param(WINDOW_MODEL, 512, id="gemma", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("layout", ["unified", "split"])
def test_drafts_across_the_border_of_a_window(model: Path, window: int, layout: str) -> None:
    """What is cut off may have been guarded, and a sequence keeps all its cells."""
    driver = ModelDriver(fetched(model), ctx_size=4096, kv_layout=layout)
    source = random.Random("window")
    prompt = [source.randrange(100, 40_000) for _ in range(window - 22)]
    plain = driver.alone(prompt, NEW)
    chunk = first_chunk(1, prompt, max_new=NEW, ignore_eos=True)
    driver.prefill(with_parameters(chunk, max_draft_tokens=6, prediction=corrupted(plain, 0.3)))
    steps = len(driver.decode([1], max_draft_tokens=16))
    assert steps < NEW - 10 or driver.output[1] != plain
    assert driver.first_position(1) == 0
    driver.check_same(prompt, plain, driver.output[1])
    driver.engine.close()
