"""llama.cpp on the demo model and one with random weights, compared with llama-cpp-python's single-sequence Llama."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import FinishReason, StepOutcome
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.config import ShardConfig
from caravan_shard.protocol.results import StepResult
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.penalties import SEQUENCE_BREAKERS, DryPenalty
from caravan_testing.shard_builders import EngineDriver, first_chunk, next_chunk
from caravan_testing.shard_models import DEMO_MODEL, WORDS_MODEL, fetched

pytestmark = pytest.mark.model

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a small dog who",
    "def fibonacci(n):",
    "Water boils at a temperature of",
)
NEW_TOKENS = 12


def case(model: Path, layout: KvLayout, *, slow: bool = False) -> Any:
    name = "words" if model == WORDS_MODEL else "demo"
    return pytest.param((model, layout), id=f"{name}-{layout.value}", marks=[pytest.mark.slow] if slow else [])


# Each of the tests that take no others runs on these. Texts that a model has learned take the demo model.
CASES = [
    *[case(WORDS_MODEL, layout) for layout in KvLayout],
    *[case(DEMO_MODEL, layout, slow=True) for layout in KvLayout],
]
DEMO_CASES = [case(DEMO_MODEL, KvLayout.UNIFIED), case(DEMO_MODEL, KvLayout.SPLIT, slow=True)]
# A split cache cannot be full: each sequence has its own cells.
UNIFIED_CASES = [case(WORDS_MODEL, KvLayout.UNIFIED), case(DEMO_MODEL, KvLayout.UNIFIED, slow=True)]


@pytest.fixture(scope="module", params=CASES)
def shard(request: pytest.FixtureRequest) -> Iterator[EngineDriver]:
    """A shard with a small context, in each layout."""
    from caravan_shard.backends.llama.backend import LlamaCppBackend

    model, layout = request.param
    config = ShardConfig(
        model=str(fetched(model)),
        ctx_size=1024,
        parallel=4,
        batch_size=256,
        ubatch_size=64,
        threads=1,
        flash_attn="on",
        kv_layout=layout.value,
    )
    driver = EngineDriver(LlamaCppBackend(config))
    yield driver
    driver.engine.close()


@pytest.fixture
def driver(shard: EngineDriver) -> EngineDriver:
    """The shard, empty."""
    shard.engine.release_all()
    return shard


@pytest.fixture(scope="module")
def oracle() -> Iterator[Any]:
    """llama-cpp-python's own generator."""
    from llama_cpp import Llama

    llama = Llama(str(DEMO_MODEL), n_ctx=512, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False)
    yield llama
    llama.close()


def tokens_of(driver: EngineDriver, text: str) -> list[int]:
    tokens: list[int] = driver.backend.vocabulary.tokenize(text, add_special=True, parse_special=True)
    return tokens


def alone(driver: EngineDriver, tokens: list[int], **fields: Any) -> list[int]:
    driver.prefill(first_chunk(0, tokens, max_new=NEW_TOKENS, ignore_eos=True, **fields))
    driver.decode([0])
    driver.engine.release_all()
    return driver.output.pop(0)


@pytest.mark.parametrize("shard", DEMO_CASES, indirect=True)
def test_the_output_of_a_single_sequence_equals_llamas(driver: EngineDriver, oracle: Any) -> None:
    for text in TEXTS:
        tokens = tokens_of(driver, text)
        assert tokens == oracle.tokenize(text.encode(), add_bos=True, special=True)
        expected = []
        for token in oracle.generate(tokens, temp=0.0, repeat_penalty=1.0):
            expected.append(token)
            if len(expected) == NEW_TOKENS:
                break
        assert alone(driver, tokens) == expected


def test_a_batch_has_the_outputs_that_its_sequences_have_alone(driver: EngineDriver) -> None:
    prompts = [tokens_of(driver, text) for text in TEXTS]
    expected = [alone(driver, prompt) for prompt in prompts]
    # Two sequences together, one in chunks with them, and a late one make every kind of step.
    options: Any = {"max_new": NEW_TOKENS, "ignore_eos": True}
    driver.prefill(first_chunk(0, prompts[0], **options), first_chunk(3, prompts[3], **options))
    driver.prefill(first_chunk(1, prompts[1][:4], total=len(prompts[1]), last=False, **options), riders=[3, 0])
    driver.prefill(next_chunk(1, 4, prompts[1][4:]), first_chunk(2, prompts[2], **options), riders=[0])
    driver.decode([0, 1, 2, 3])
    assert [driver.output[key] for key in range(4)] == expected


def test_a_copied_prefix_continues_like_a_computed_one(driver: EngineDriver) -> None:
    prefix, tails = tokens_of(driver, TEXTS[1]), [tokens_of(driver, " named Max"), tokens_of(driver, " loved to")]
    expected = [alone(driver, prefix + tail) for tail in tails]
    options: Any = {"max_new": NEW_TOKENS, "ignore_eos": True}
    driver.prefill(first_chunk(3, prefix + tails[0], **options))
    driver.decode([3], steps=3)
    driver.prefill(first_chunk(1, tails[1], copy=PrefixCopy(source_id=3, length=len(prefix)), **options), riders=[3])
    # The copy outlives its source.
    driver.decode([3])
    driver.keep(1)
    driver.decode([1])
    assert driver.output[3] == expected[0]
    assert driver.output[1] == expected[1]


@pytest.mark.parametrize("shard", DEMO_CASES, indirect=True)
def test_eos_ends_a_sequence(driver: EngineDriver) -> None:
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    driver.prefill(first_chunk(2, tokens_of(driver, text), max_new=40))
    last = driver.decode([2])[-1].rows
    assert last.finish_reasons == [FinishReason.EOS_TOKEN]
    assert last.pieces == [b"<|im_end|>"]
    assert last.specials == [True]
    data = b"".join(driver.backend.vocabulary.piece(token).data for token in driver.output[2])
    assert b"Paris" in data


def test_logprobs_match_the_logits(driver: EngineDriver) -> None:
    result = driver.prefill(first_chunk(1, tokens_of(driver, TEXTS[0]), logprobs=True, top_n_tokens=5))
    logits = driver.backend.logits(1)[0].astype(np.float64)
    exact = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    assert result.rows.token_ids == [int(exact.argmax())]
    assert result.rows.logprobs == pytest.approx([exact.max()], abs=1e-4)
    assert result.rows.top_token_ids == np.argsort(-exact)[:5].tolist()
    assert result.rows.top_logprobs == pytest.approx(np.sort(exact)[::-1][:5].tolist(), abs=1e-4)


def test_a_seed_reproduces_its_draws(driver: EngineDriver) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=42)
    tokens = tokens_of(driver, TEXTS[1])
    first = alone(driver, tokens, sampling=sampling)
    assert alone(driver, tokens, sampling=sampling) == first
    other = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=43)
    assert alone(driver, tokens, sampling=other) != first


@pytest.mark.parametrize("shard", UNIFIED_CASES, indirect=True)
def test_a_full_cache_is_a_result_and_the_others_continue(driver: EngineDriver) -> None:
    prompt = tokens_of(driver, TEXTS[0])
    expected = alone(driver, prompt)
    driver.prefill(first_chunk(0, prompt, max_new=NEW_TOKENS, ignore_eos=True))
    filler = tokens_of(driver, "word " * 1_000)[:900]
    start = 0
    while start < len(filler):
        part = filler[start : start + 250]
        chunk = (
            first_chunk(1, part, total=len(filler), last=False)
            if start == 0
            else next_chunk(1, start, part, last=False)
        )
        driver.prefill(chunk)
        start += len(part)
    copy = PrefixCopy(source_id=0, length=3)
    result = driver.try_prefill(first_chunk(2, filler[:200], copy=copy, max_new=5), riders=[0])
    assert isinstance(result, StepResult)
    assert result.outcome is StepOutcome.NO_KV
    assert [driver.backend.length(key) for key in range(4)] == [len(prompt), 900, 0, 0]
    driver.decode([0])
    assert driver.output[0] == expected


def test_a_batch_that_llama_cpp_refuses_changes_nothing(driver: EngineDriver) -> None:
    prompt = tokens_of(driver, TEXTS[0])
    driver.prefill(first_chunk(0, prompt))
    gap = TokenBatch(np.array([5], np.int32), np.array([90], np.int32), np.array([0], np.int32), np.array([1], np.int8))
    assert driver.backend.decode(gap) is DecodeOutcome.INVALID
    assert driver.backend.length(0) == len(prompt)


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParams(temperature=0.0, top_k=40),
        SamplingParams(temperature=0.0, top_p=0.9),
        SamplingParams(temperature=0.0, min_p=0.05),
        SamplingParams(temperature=0.0, typical_p=0.6),
        SamplingParams(temperature=0.0, top_k=100, typical_p=0.95, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.02),
        SamplingParams(temperature=0.0, top_k=100, top_p=0.9, min_p=0.02, xtc_probability=0.01, xtc_threshold=0.05),
        SamplingParams(temperature=0.0, typical_p=0.6, xtc_probability=1.0, xtc_threshold=0.6),
    ],
    ids=str,
)
def test_llama_cpp_filters_like_the_reference(parameters: SamplingParams) -> None:
    from caravan_shard.backends.llama.sampling.filter import LlamaFilter

    size = 3_000
    llama_filter = LlamaFilter(size)
    for seed in range(20):
        logits = (np.random.default_rng(seed).standard_normal(size) * 2.5).astype(np.float32)
        logits -= logits.max()
        mine = set(llama_filter(logits, parameters).tolist())
        reference = set(filter_candidates(logits, parameters).tolist())
        # Running sums in float32 and float64 may differ by the one token at the border.
        assert len(mine ^ reference) <= 1, seed


@pytest.mark.parametrize("shard", UNIFIED_CASES, indirect=True)
def test_dry_gives_the_penalties_of_llama_cpp(driver: EngineDriver) -> None:
    """Random texts with repetitions, compared with llama.cpp's sampler and its default sequence breakers."""
    import llama_cpp

    backend: Any = driver.backend
    vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(backend._context))
    breakers = (ctypes.c_char_p * len(SEQUENCE_BREAKERS))(*[bytes([byte]) for byte in SEQUENCE_BREAKERS])
    size = backend.facts.vocabulary_size
    random = np.random.default_rng(11)
    words = tokens_of(driver, 'a dog: the cat "saw" it\nand *ran* away. We all know')
    for last, allowed in ((None, 2), (None, 0), (64, 2), (20, 1), (50, 4)):
        parameters = SamplingParams(
            temperature=0.0, dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=allowed, dry_penalty_last_n=last
        )
        for _ in range(6):
            chosen = random.choice(words, random.integers(1, 9))
            tokens = random.choice(chosen, random.integers(1, 120)).tolist()
            penalty = DryPenalty(parameters, lambda token: backend.vocabulary.piece(token).data)
            penalty.add(tokens, output=False)
            logits = np.zeros(size, np.float32)
            penalty.apply(logits)
            sampler = llama_cpp.llama_sampler_init_dry(
                vocab, 0.8, 1.75, allowed, len(tokens) if last is None else last, breakers, len(breakers)
            )
            # Our penalties are clamped here.
            np.testing.assert_allclose(logits, np.maximum(applied(sampler, tokens, size), -1e9), rtol=1e-5)


def applied(sampler: Any, tokens: list[int], size: int) -> Any:
    """Apply a sampler that has accepted ``tokens`` to logits of 0, and free it."""
    import llama_cpp

    for token in tokens:
        llama_cpp.llama_sampler_accept(sampler, token)
    data = np.zeros(size, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    data["id"] = np.arange(size)
    pointer = ctypes.cast(data.ctypes.data, llama_cpp.llama_token_data_p)
    candidates = llama_cpp.llama_token_data_array(data=pointer, size=size, selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(candidates))
    llama_cpp.llama_sampler_free(sampler)
    assert (data["id"] == np.arange(size)).all()
    return data["logit"]
