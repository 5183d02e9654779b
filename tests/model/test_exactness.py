"""In the split layout, logits depend neither on company nor on the size of chunks if a thorough comparison says so."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from caravan_proto.messages.limits import KvLayout
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.numerics import NumericsProbe
from caravan_testing.media_prompts import MediaPrompt, run_prompt
from caravan_testing.projectors import WORDS, SpellingModel
from caravan_testing.shard_models import DEMO_MODEL, VOCABULARY_SIZE, WORDS_MODEL, ModelDriver, fetched, requantise

pytestmark = pytest.mark.model

STEPS = 4


def batch(*parts: tuple[int, int, list[int]]) -> TokenBatch:
    """Make a batch of (sequence id, start, tokens); the last token of each has an output."""
    return TokenBatch(
        tokens=np.array([token for _, _, tokens in parts for token in tokens], np.int32),
        positions=np.concatenate([np.arange(start, start + len(tokens)) for _, start, tokens in parts]).astype(
            np.int32
        ),
        sequence_ids=np.repeat([key for key, _, _ in parts], [len(tokens) for _, _, tokens in parts]).astype(np.int32),
        outputs=np.concatenate([np.arange(len(tokens)) == len(tokens) - 1 for _, _, tokens in parts]).astype(np.int8),
    )


def generate(
    driver: ModelDriver, prompt: list[int], cuts: list[int], others: list[list[int]], *, first: int = 40
) -> list[Floats]:
    """Return the logits of the prompt and of some tokens after it.

    ``others`` are prefilled beside it, ``first`` tokens of each, and then decode.
    """
    backend = driver.backend
    backend._memory.clear()
    own = 1  # it has the end of one before it and the beginning of another after it
    texts = {0: others[0], 2: others[1]} if others else {}
    done = dict.fromkeys(texts, 0)

    def step(start: int, tokens: list[int]) -> Floats:
        parts = [(own, start, tokens)]
        for key, text in texts.items():
            count = first if done[key] == 0 else 1
            parts.append((key, done[key], text[done[key] : done[key] + count]))
            done[key] += count
        parts.sort()
        assert backend.decode(batch(*parts)) is DecodeOutcome.OK
        row = [key for key, _, _ in parts].index(own)
        logits: Floats = backend.logits(len(parts))[row].copy()
        return logits

    borders = [0, *cuts, len(prompt)]
    found = [step(start, prompt[start:end]) for start, end in pairwise(borders)][-1:]
    for position in range(len(prompt), len(prompt) + STEPS):
        found.append(step(position, [int(found[-1].argmax())]))
    return found


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        pytest.param(WORDS_MODEL, "", id="words"),
        pytest.param(WORDS_MODEL, "Q4_0", id="words, 4 bits in rearranged blocks"),
        pytest.param(WORDS_MODEL, "Q4_1", id="words, 4 bits"),
        pytest.param(DEMO_MODEL, "", id="demo", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_company_and_chunks_change_no_bit(model: Path, weights: str, exact: bool, tmp_path: Path) -> None:
    """Here no row of attention depends on others; whether those of products with the weights do, the CPU decides."""
    chosen = requantise(fetched(model), tmp_path / "model.gguf", weights) if weights else fetched(model)
    driver = ModelDriver(chosen, ctx_size=2048, kv_layout="split", flash_attn="auto", exact=exact)
    backend = driver.backend
    probe = NumericsProbe(backend.decode, backend.logits, backend._memory, backend.vocabulary.size)
    found = probe.measure(longest=256, sequences=3, rows=512, thorough=True)
    is_same = bool(found.company and found.chunk)
    assert is_same or not exact
    if not is_same:
        driver.engine.close()
        return
    source = random.Random("exact")
    for length in (2, 9, 64, 101):
        prompt = [source.randrange(100, VOCABULARY_SIZE) for _ in range(length)]
        others = [[source.randrange(100, VOCABULARY_SIZE) for _ in range(200)] for _ in range(2)]
        alone = generate(driver, prompt, [], [])
        middle = [length // 2] if length > 3 else []
        thirds = [length // 3, 2 * length // 3] if length > 8 else []
        for cuts, company in (([], others), (middle, []), (middle, others), (thirds, others)):
            for place, logits in enumerate(generate(driver, prompt, cuts, company)):
                assert np.array_equal(logits, alone[place]), (length, cuts, bool(company), place)
        # Chunks of one size are computed together.
        for place, logits in enumerate(generate(driver, prompt, [], others, first=length)):
            assert np.array_equal(logits, alone[place]), (length, place)
    driver.engine.close()


def test_exact_logits_behind_pictures_are_those_behind_words_in_any_chunks(tmp_path: Path) -> None:
    model = SpellingModel(tmp_path)
    driver = model.driver(KvLayout.SPLIT, exact=True, flash_attn="auto")
    expected = run_prompt(driver, MediaPrompt(WORDS))
    logits = driver.backend.logits(1).copy()
    for cuts in ([], [5], [4, 20, 21], [1, 2, 3, 9, 10, 11]):
        driver.engine.release_all()
        assert run_prompt(driver, model.prompt(driver), cuts=cuts) == expected
        np.testing.assert_array_equal(driver.backend.logits(1), logits)
    driver.engine.close()
