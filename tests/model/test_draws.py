"""Sampling draws the token that llama.cpp's chain and the number of (seed, position) select, in any batch.

The reference sorts nothing itself: the chain applies every filter to all tokens within a fixed reach of the peak, and
the draw is one running sum in float64. A change of a draw would change the output of every request with a seed. Each
token depends only on (seed, position) and the tokens before it: a different batch, a preemption, or a resumption from
prompt and output changes nothing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.sampling.filter import LlamaFilter
from caravan_shard.sampling.choice import Choice, choose_token
from caravan_shard.sampling.draw import Purpose, draw_index, uniform
from caravan_shard.sampling.penalties import make_penalties
from caravan_testing.logits import kinds_of_logits
from caravan_testing.shard_builders import first_chunk, load_entry, save_entry, with_parameters
from caravan_testing.shard_models import DEMO_MODEL, WORDS_MODEL, ModelDriver, fetched

pytestmark = pytest.mark.model

TEXT = "a b c a b d a b c a b d. The cat sat on the mat, and the cat sat on the"
NEW_TOKENS = 20
SAMPLING = SamplingParams(
    temperature=0.8,
    min_p=0.02,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    repeat_last_n=24,
    dry_multiplier=0.8,
    dry_penalty_last_n=None,
    xtc_probability=0.5,
    xtc_threshold=0.1,
    seed=17,
)
# Logits differ by less than this between batches of different shapes (observed).
ROUNDING_LOGITS = 0.1

SIZES = (49_152, 50_257, 300, 65, 1)
# As many tokens as Gemma has.
LARGE = 262_144
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 40},
    {"top_k": 1},
    {"top_k": 5_000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1e-4},
    {"min_p": 1.0},
    {"typical_p": 0.9},
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 100, "typical_p": 0.9, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.02},
    {"typical_p": 0.8, "min_p": 0.01},
    {"xtc_probability": 0.6, "xtc_threshold": 0.05},
    {"top_p": 0.9, "xtc_probability": 0.6, "xtc_threshold": 0.05},
    {"min_p": 0.02, "xtc_probability": 0.6, "xtc_threshold": 0.1},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "xtc_probability": 0.6, "xtc_threshold": 0.1},
)


@pytest.fixture(
    scope="module",
    params=[
        *[pytest.param((WORDS_MODEL, layout), id=f"words-{layout.value}") for layout in KvLayout],
        *[pytest.param((DEMO_MODEL, layout), id=f"demo-{layout.value}", marks=pytest.mark.slow) for layout in KvLayout],
    ],
)
def shard(request: pytest.FixtureRequest) -> Iterator[ModelDriver]:
    """A shard with a small context, in each layout."""
    model, layout = request.param
    driver = ModelDriver(fetched(model), ctx_size=1024, batch_size=256, ubatch_size=64, kv_layout=layout.value)
    yield driver
    driver.engine.close()


@pytest.fixture
def driver(shard: ModelDriver) -> ModelDriver:
    """The shard, empty."""
    shard.engine.release_all()
    return shard


def check(driver: ModelDriver, prompt: list[int], output: list[int], sampling: SamplingParams = SAMPLING) -> None:
    """Check that each token of ``output`` is sampled from its logits, with a tolerance for their rounding."""
    driver.engine.release_all()
    tokens = [*prompt, *output]
    driver.prefill(with_parameters(first_chunk(0, tokens, max_new=1), prompt_logprobs=True))
    logits = driver.backend.logits(len(tokens)).copy()
    penalties = make_penalties(sampling, lambda token: driver.backend.vocabulary.piece(token).data)
    for penalty in penalties:
        penalty.add(prompt, output=False)
    random = np.random.default_rng(0)
    wrong = []
    for place, token in enumerate(output):
        position = len(prompt) + place
        choice = Choice(sampling, position, penalties)
        for number in range(20):
            noise = random.uniform(-1, 1, logits.shape[1]) * (ROUNDING_LOGITS if number else 0.0)
            row = (logits[position - 1] + noise).astype(np.float32)
            if choose_token(row, choice, driver.backend.candidate_filter) == token:
                break
        else:
            wrong.append(place)
        for penalty in penalties:
            penalty.add([token], output=True)
    assert not wrong, f"tokens {wrong} of {output}"


def test_a_resumed_sequence_samples_the_same_tokens(driver: ModelDriver) -> None:
    prompt = driver.tokens(TEXT)
    driver.prefill(first_chunk(1, prompt, sampling=SAMPLING, max_new=NEW_TOKENS, ignore_eos=True))
    driver.decode([1], steps=8)
    earlier = driver.output[1]
    driver.engine.release_all()
    # The sequence resumes in a batch with another one, under another id.
    driver.prefill(
        first_chunk(0, driver.tokens("Once upon a time"), temperature=1.0, ignore_eos=True),
        first_chunk(
            3,
            [*prompt, *earlier],
            prompt_length=len(prompt),
            sampling=SAMPLING,
            max_new=NEW_TOKENS - len(earlier),
            ignore_eos=True,
        ),
    )
    driver.decode([0, 3], steps=NEW_TOKENS)
    output = [*earlier, *driver.output[3]]
    assert len(output) == NEW_TOKENS
    check(driver, prompt, output)


def test_a_preempted_sequence_samples_the_same_tokens(driver: ModelDriver) -> None:
    prompt = driver.tokens(TEXT)
    chunk = first_chunk(0, prompt, sampling=SAMPLING, max_new=NEW_TOKENS, ignore_eos=True)
    driver.prefill(chunk)
    driver.decode([0])
    expected = driver.output[0]
    driver.engine.release_all()
    driver.prefill(chunk)
    driver.decode([0], steps=9)
    earlier = list(driver.output[0])
    known = [*prompt, *earlier]
    assert driver.save(save_entry(0, known[:-1], release=True)) == [True]
    assert driver.load(load_entry(0, known[:-1])) == [True]
    resumed = first_chunk(
        0,
        known[-1:],
        copy=PrefixCopy(source_id=0, length=len(known) - 1),
        prompt_length=len(prompt),
        sampling=SAMPLING,
        max_new=NEW_TOKENS - len(earlier),
        ignore_eos=True,
    )
    driver.prefill(resumed)
    driver.decode([0])
    assert earlier == expected[: len(earlier)]
    check(driver, prompt, [*earlier, *driver.output[0]])


def test_the_check_detects_other_seeds_and_other_histories(driver: ModelDriver) -> None:
    prompt = driver.tokens(TEXT)
    driver.prefill(first_chunk(0, prompt, sampling=SAMPLING, max_new=NEW_TOKENS, ignore_eos=True))
    driver.decode([0])
    output = driver.output[0]
    for other in (
        replace(SAMPLING, seed=18),
        replace(SAMPLING, dry_multiplier=0.0, repetition_penalty=1.0, frequency_penalty=0.0),
        replace(SAMPLING, xtc_probability=0.0),
    ):
        with pytest.raises(AssertionError):
            check(driver, prompt, output, other)


@pytest.mark.parametrize("shard", [(DEMO_MODEL, KvLayout.UNIFIED)], indirect=True, ids=["demo-unified"])
def test_stop_tokens_and_min_tokens_on_a_real_vocabulary(driver: ModelDriver) -> None:
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = driver.tokens(text)
    driver.prefill(first_chunk(2, prompt, max_new=60))
    driver.decode([2])
    free = driver.output[2]
    stop = free[3]
    assert stop not in free[:3]
    driver.engine.release_all()
    driver.prefill(first_chunk(2, prompt, max_new=60, stop_token_ids=frozenset({stop})))
    last = driver.decode([2])[-1].rows
    assert driver.output[2] == free[:4]
    assert last.finish_reasons == [FinishReason.STOP_TOKEN]
    driver.engine.release_all()
    driver.prefill(first_chunk(2, prompt, max_new=60, min_tokens=len(free) + 5))
    driver.decode([2])
    assert driver.output[2][: len(free) - 1] == free[:-1]
    assert len(driver.output[2]) > len(free) + 5
    assert not set(driver.output[2][: len(free) + 5]) & driver.backend.facts.eos_token_ids


def reference(logits: Floats, parameters: SamplingParams, position: int, chain: LlamaFilter) -> int:
    """Return the token that the number selects among those that the chain keeps."""
    temperature = np.float32(parameters.temperature)
    if parameters.xtc_probability <= uniform(parameters.seed, position, Purpose.XTC):
        parameters = replace(parameters, xtc_probability=0.0)
    if np.isnan(logits).any():
        return int(logits.argmax())
    peak = logits.max()
    ids = np.arange(len(logits))
    if parameters.filters:
        reach = 36.0
        with np.errstate(over="ignore"):
            weights = np.exp((logits - peak) / temperature)
        near = np.flatnonzero(logits >= peak - np.float32(10.0) * temperature)
        if parameters.top_k > 0:
            # Which of several equally likely tokens the chain keeps depends on how many it gets.
            reach = 10.0 if len(near) >= parameters.top_k else 36.0
        elif parameters.typical_p == 1.0 and parameters.top_p < 1.0:
            # The chain's sums in float32 are closer over few tokens. top_p of the whole is a larger share of a part.
            share = parameters.top_p * weights.sum(dtype=np.float64) / weights[near].sum(dtype=np.float64)
            if share <= 0.9999:
                reach, parameters = 10.0, replace(parameters, top_p=float(share))
        ids = np.flatnonzero(logits >= peak - np.float32(reach) * temperature)
        ids = ids[np.sort(chain((logits[ids] - peak) / temperature, parameters))]
    with np.errstate(over="ignore"):
        cumulative = np.cumsum(np.exp((logits[ids] - peak) / temperature), dtype=np.float64)
    place = int(np.searchsorted(cumulative, uniform(parameters.seed, position) * cumulative[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def check_draws(size: int, fields: dict[str, Any], *, draws: int) -> None:
    """Compare draws of every kind of logits at several temperatures."""
    chain = LlamaFilter(size)
    for kind, logits in kinds_of_logits(size):
        for number, temperature in enumerate((0.8, 1.0, 0.02, 1.7)):
            parameters = SamplingParams(temperature=temperature, seed=size + number, **fields)
            for position in range(draws):
                token = choose_token(logits, Choice(parameters, position), chain)
                assert token == reference(logits, parameters, position, chain), (size, kind, temperature, position)


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_each_draw_is_that_of_llama_cpps_chain(fields: dict[str, Any]) -> None:
    for size in SIZES:
        # The slow test below repeats the large ones.
        check_draws(size, fields, draws=1 if size > 10_000 else 3)


@pytest.mark.slow
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_more_draws_from_large_vocabularies_are_those_of_llama_cpps_chain(fields: dict[str, Any]) -> None:
    for size in SIZES:
        if size > 10_000:
            check_draws(size, fields, draws=3)
    # Without top_k, typical_p and XTC sort the whole vocabulary, which takes 50 ms at the largest size.
    if fields.keys().isdisjoint({"typical_p", "xtc_probability"}) or "top_k" in fields:
        check_draws(LARGE, fields, draws=1)


def test_a_number_next_to_the_border_of_two_tokens_selects_the_right_one() -> None:
    """Sums in float32 cannot tell the two apart."""
    random = np.random.default_rng(1)
    for scale in (0.01, 1.0, 4.0):
        logits = (random.standard_normal(49_152) * scale).astype(np.float32)
        logits -= logits.max()
        cumulative = np.cumsum(np.exp(logits), dtype=np.float64)
        for token in random.integers(1, 49_151, 300).tolist():
            border = cumulative[token] / cumulative[-1]
            for number in (border - 1e-11, border + 1e-11):
                expected = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
                assert draw_index(logits, number) == expected
