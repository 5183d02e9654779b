"""Drafts on llama.cpp, also of a second model: the same tokens in fewer steps."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from caravan_proto.messages.results import DraftSource
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.startup_error import StartupError
from caravan_testing.shard_builders import first_chunk, with_parameters
from caravan_testing.shard_models import (
    DEMO_MODEL,
    PLAIN_MODEL,
    SMALL_WINDOW_MODEL,
    VOCABULARY_SIZE,
    WINDOW_MODEL,
    WORDS_MODEL,
    ModelDriver,
    fetched,
    requantise,
)
from caravan_testing.shard_tiny_mamba import TOKENS, write_tiny_mamba
from caravan_testing.shard_tiny_ranker import write_tiny_ranker

pytestmark = pytest.mark.model

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

MODEL_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a small dragon that",
)
MODEL_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.2, seed=4),
)
MODEL_NEW = 24


def corrupted(output: Sequence[int], share: float) -> tuple[int, ...]:
    """Replace a ``share`` of the tokens."""
    source = random.Random(f"{share}")
    return tuple(source.randrange(100, VOCABULARY_SIZE) if source.random() < share else token for token in output)


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
    prompt = [source.randrange(100, VOCABULARY_SIZE) for _ in range(window - 22)]
    plain = driver.alone(prompt, NEW)
    chunk = first_chunk(1, prompt, max_new=NEW, ignore_eos=True)
    driver.prefill(with_parameters(chunk, max_draft_tokens=6, prediction=corrupted(plain, 0.3)))
    steps = len(driver.decode([1], max_draft_tokens=16))
    assert steps < NEW - 10 or driver.output[1] != plain
    assert driver.first_position(1) == 0
    driver.check_same(prompt, plain, driver.output[1])
    driver.engine.close()


@pytest.fixture(
    scope="module",
    params=[pytest.param(WORDS_MODEL, id="words"), pytest.param(DEMO_MODEL, id="demo", marks=pytest.mark.slow)],
)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelDriver]:
    model = fetched(request.param)
    weights = "Q8_0" if request.param == WORDS_MODEL else "Q4_0"
    drafting = requantise(model, tmp_path_factory.mktemp("draft") / "draft.gguf", weights)
    found = ModelDriver(model, model_draft=str(drafting), ctx_size=1024, kv_layout="split")
    yield found
    found.engine.close()


def decoded(driver: ModelDriver, sequences: int, sampling: SamplingParams, drafts: int) -> tuple[list[list[int]], int]:
    """Return the outputs of ``sequences`` together, and how many tokens of the draft model they have."""
    driver.engine.release_all()
    for key in range(sequences):
        chunk = first_chunk(
            key, driver.tokens(MODEL_PROMPTS[key]), max_new=MODEL_NEW, ignore_eos=True, sampling=sampling
        )
        driver.prefill(with_parameters(chunk, max_draft_tokens=drafts))
    ids = list(range(sequences))
    results = driver.decode(ids, max_draft_tokens=drafts * sequences)
    columns = [result.drafts for result in results if result.drafts is not None]
    accepted = sum(
        count
        for rows in columns
        for source, count in zip(rows.sources, rows.accepted, strict=True)
        if source is DraftSource.MODEL
    )
    return [driver.output[key] for key in ids], accepted


@pytest.mark.parametrize("sampling", MODEL_SAMPLINGS, ids=["greedy", "drawn"])
def test_drafts_of_a_model_change_no_token(driver: ModelDriver, sampling: SamplingParams) -> None:
    """Below 257 cells, attention rounds alike for one token and for several. Flash attention is on."""
    plain, _ = decoded(driver, 1, sampling, 0)
    with_drafts, accepted = decoded(driver, 1, sampling, 4)
    assert with_drafts == plain
    # How many depends on how the host rounds, which decides the text.
    assert accepted > 0


def test_several_sequences_have_drafts_of_a_model(driver: ModelDriver) -> None:
    plain, _ = decoded(driver, 3, SamplingParams(temperature=0.0), 0)
    with_drafts, accepted = decoded(driver, 3, SamplingParams(temperature=0.0), 3)
    for prompt, without, output in zip(MODEL_PROMPTS, plain, with_drafts, strict=True):
        driver.check_same(driver.tokens(prompt), without, output)
    assert accepted > 0


def test_the_facts_name_the_draft_model(driver: ModelDriver) -> None:
    assert driver.backend.facts.draft_model == "draft.gguf"


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"another vocabulary: it has 259 tokens, the model 8192"):
        ModelDriver(fetched(WORDS_MODEL), model_draft=str(fetched(PLAIN_MODEL)), ctx_size=512)
    model = write_tiny_ranker(tmp_path / "model.gguf")
    changed = write_tiny_ranker(tmp_path / "changed.gguf", tokens=[*TOKENS[:100], "yes", *TOKENS[101:]])
    with pytest.raises(StartupError, match=r"its token 100 is 'yes', that of the model '<0x61>'"):
        ModelDriver(model, model_draft=str(changed), ctx_size=512)
    ended = write_tiny_ranker(tmp_path / "ended.gguf", end=50)
    with pytest.raises(StartupError, match="its end token is 50, that of the model 2"):
        ModelDriver(model, model_draft=str(ended), ctx_size=512)


def test_a_start_that_fails_frees_both_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []

    def noting(name: str) -> Callable[[object], None]:
        free = getattr(llama_cpp, name)

        def note(handle: object) -> None:
            freed.append(name)
            free(handle)

        return note

    for name in ("llama_free", "llama_model_free"):
        monkeypatch.setattr(llama_cpp, name, noting(name))
    model = write_tiny_ranker(tmp_path / "model.gguf")
    with pytest.raises(StartupError, match="cannot draft"):
        ModelDriver(model, model_draft=str(write_tiny_mamba(tmp_path / "mamba.gguf")), ctx_size=512)
    assert freed[-4:] == ["llama_free", "llama_model_free"] * 2


def test_a_draft_model_may_have_a_few_tokens_less(tmp_path: Path) -> None:
    """Files of one family are padded to different sizes."""
    model = write_tiny_ranker(tmp_path / "model.gguf", tokens=[*TOKENS, *(f"<pad{number}>" for number in range(8))])
    driver = ModelDriver(model, model_draft=str(write_tiny_ranker(tmp_path / "small.gguf")), ctx_size=512)
    for prompt, drafts in (([1, 70, 71, 72], True), ([1, 70, len(TOKENS) + 2, 72], False)):
        plain = driver.alone(prompt, 12)
        driver.prefill(with_parameters(first_chunk(0, prompt, max_new=12, ignore_eos=True), max_draft_tokens=2))
        results = driver.decode([0], max_draft_tokens=2)
        sources = [source for result in results if result.drafts is not None for source in result.drafts.sources]
        assert (DraftSource.MODEL in sources) is drafts
        assert driver.output[0] == plain
        driver.engine.release_all()
    driver.engine.close()


def test_recurrent_models_neither_draft_nor_have_drafts(tmp_path: Path) -> None:
    mamba = write_tiny_mamba(tmp_path / "mamba.gguf")
    model = write_tiny_ranker(tmp_path / "model.gguf")
    with pytest.raises(StartupError, match=r"mamba\.gguf cannot draft: its memory cannot be cut back"):
        ModelDriver(model, model_draft=str(mamba), ctx_size=512)
    driver = ModelDriver(mamba, model_draft=str(model), ctx_size=512)
    assert driver.backend.draft_model is None
    driver.engine.close()


def test_a_missing_file_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(StartupError, match=r"cannot read the draft model /nowhere\.gguf"):
        ModelDriver(fetched(PLAIN_MODEL), model_draft="/nowhere.gguf", ctx_size=512)
