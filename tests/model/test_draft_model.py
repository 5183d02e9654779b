"""A second model that drafts on llama.cpp: the same tokens in fewer steps."""

from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest

from caravan_proto.messages.results import DraftSource
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import StartupError
from caravan_testing.shard_builders import first_chunk, with_parameters
from caravan_testing.shard_models import DEMO_MODEL, PLAIN_MODEL, WORDS_MODEL, ModelDriver, fetched, requantise
from caravan_testing.shard_tiny_mamba import TOKENS, write_tiny_mamba
from caravan_testing.shard_tiny_ranker import write_tiny_ranker

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a small dragon that",
)
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.2, seed=4),
)
NEW = 24


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
        chunk = first_chunk(key, driver.tokens(PROMPTS[key]), max_new=NEW, ignore_eos=True, sampling=sampling)
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


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "drawn"])
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
    for prompt, without, output in zip(PROMPTS, plain, with_drafts, strict=True):
        driver.check_same(driver.tokens(prompt), without, output)
    assert accepted > 0


def test_the_facts_name_the_draft_model(driver: ModelDriver) -> None:
    assert driver.backend.facts.draft_model == "draft.gguf"


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"another vocabulary: it has 259 tokens, the model 49152"):
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
