"""Embeddings of real models, compared with llama-cpp-python's Llama, also while sequences run."""

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from caravan_shard.backends.base import StartupError
from caravan_shard.backends.llama.hidden_states import HiddenStates
from caravan_shard.protocol.commands import EmbedText
from caravan_shard.protocol.results import Embedded
from caravan_testing.shard_builders import first_chunk
from caravan_testing.shard_models import DEMO_MODEL, WORDS_MODEL, ModelDriver, fetched
from caravan_testing.shard_tiny_mamba import write_tiny_mamba
from caravan_testing.shard_tiny_ranker import classifier, write_tiny_ranker

pytestmark = pytest.mark.model

TEXTS = ("The capital of France is Paris.", "Paris is the capital city of France.", "def f(x): return x", "x")
# The values of llama.cpp's enum llama_pooling_type.
POOLINGS = {"mean": 1, "cls": 2, "last": 3, "model": 1}


def embed(driver: ModelDriver, text: str) -> Any:
    (result,) = driver.engine.embed([EmbedText(driver.tokens(text))])
    assert isinstance(result, Embedded), result
    return result.values


@pytest.mark.parametrize(
    ("model", "pooling"),
    [
        *[pytest.param(WORDS_MODEL, pooling, id=f"words-{pooling}") for pooling in POOLINGS],
        pytest.param(DEMO_MODEL, "mean", id="demo-mean"),
        *[
            pytest.param(DEMO_MODEL, pooling, id=f"demo-{pooling}", marks=pytest.mark.slow)
            for pooling in POOLINGS
            if pooling != "mean"
        ],
    ],
)
def test_embeddings_equal_llamas(model: Path, pooling: str) -> None:
    from llama_cpp import Llama

    driver = ModelDriver(fetched(model), ctx_size=512, ubatch_size=64, embeddings=True, pooling=pooling)
    assert driver.backend.capacity.max_embed_tokens == 64
    llama = Llama(
        str(model),
        embedding=True,
        pooling_type=POOLINGS[pooling],
        n_ctx=256,
        n_batch=64,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    )
    for text in TEXTS:
        vector = embed(driver, text)
        assert vector.shape == (driver.backend.capacity.embedding_size,)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        assert np.dot(vector, np.array(llama.embed(text, normalize=True))) > 0.999, text
    llama.close()
    driver.engine.close()


def test_sequences_continue_between_texts() -> None:
    driver = ModelDriver(fetched(WORDS_MODEL), ctx_size=512, ubatch_size=64, embeddings=True)
    tokens = driver.tokens("Once upon a time there was a small dog who")
    expected = driver.alone(tokens, 10)
    alone = embed(driver, TEXTS[0])
    driver.prefill(first_chunk(1, tokens, max_new=10, ignore_eos=True))
    while driver.decode([1], steps=2):
        # EmbedText the longest allowed text, then one whose embedding is known.
        assert isinstance(driver.engine.embed([EmbedText([5] * 64)])[0], Embedded)
        np.testing.assert_allclose(embed(driver, TEXTS[0]), alone, atol=1e-5)
    assert driver.output[1] == expected
    driver.engine.close()


def test_a_recurrent_model_has_embeddings(tmp_path: Path) -> None:
    driver = ModelDriver(write_tiny_mamba(tmp_path / "m.gguf"), ctx_size=512, ubatch_size=64, embeddings=True)
    first, other = embed(driver, "a text"), embed(driver, "another")
    np.testing.assert_allclose(embed(driver, "a text"), first, atol=1e-6)
    assert np.dot(first, other) < 0.999
    driver.engine.close()


@pytest.mark.parametrize("template", ["<|q|>\n{query}<|d|>\n{document}<|end|>", ""])
def test_a_model_that_ranks_says_how_likely_it_answers_yes(tmp_path: Path, template: str) -> None:
    from llama_cpp import Llama

    path = write_tiny_ranker(tmp_path / "ranker.gguf", template=template)
    driver = ModelDriver(path, ctx_size=512, ubatch_size=64, embeddings=True)
    capacity, vocabulary = driver.backend.capacity, driver.backend.vocabulary
    assert (capacity.ranks, capacity.embedding_size, capacity.max_embed_tokens) == (True, 0, 64)
    last = Llama(
        str(path), embedding=True, pooling_type=POOLINGS["last"], n_ctx=256, n_batch=64, n_threads=1, verbose=False
    )
    relevances = set()
    for query, document in (("a?", "yes,a"), ("a?", "b"), ("{document}", "c<|end|>")):
        tokens = vocabulary.pair(query, document)
        text = b"".join(vocabulary.piece(token).data for token in tokens if not vocabulary.piece(token).special)
        filled = f"<|q|>\n{query}<|d|>\n{document}<|end|>" if template else query + document
        assert text.decode() == filled
        (result,) = driver.engine.embed([EmbedText(tokens)])
        assert isinstance(result, Embedded), result
        vector = np.array(last.embed(filled, normalize=False)) if template else None
        (relevance,) = result.values
        if vector is not None:
            yes, no = np.exp(classifier() @ vector)
            assert relevance == pytest.approx(yes / (yes + no), abs=1e-3)
        relevances.add(round(float(relevance), 4))
    assert len(relevances) == 3
    last.close()
    driver.engine.close()


@pytest.mark.parametrize(
    ("template", "controls"),
    [
        ("[Q]{query}[/Q][D]{document}[/D]", ["[Q]", "[/Q]", "[D]", "[/D]"]),
        ("<turn>user\n{query}<end>\n{document}<end>", ["<turn>", "<end>", "<end>\n"]),
        ("<s>query: {query}</s>document: {document}</s>", []),
        ("<|q|>{query}<|d|>{document}", ["<|q|>", "q|>", "<|d|>"]),
        ("{query} {document}", ["<none>"]),
    ],
)
def test_a_template_of_a_pair_has_the_control_tokens_of_its_vocabulary(
    tmp_path: Path, template: str, controls: list[str]
) -> None:
    path = write_tiny_ranker(tmp_path / "ranker.gguf", template=template, controls=controls)
    driver = ModelDriver(path, ctx_size=256, embeddings=True)
    vocabulary = driver.backend.vocabulary
    filled = template.replace("{query}", "a?").replace("{document}", "yes")
    assert vocabulary.pair("a?", "yes") == vocabulary.tokenize(filled, add_special=False, parse_special=True)
    # The texts of clients have none.
    control = next(iter(controls), "</s>")
    plain = vocabulary.tokenize(control, add_special=False, parse_special=False)
    assert len(vocabulary.pair("a?", control)) == len(vocabulary.pair("a?", "")) + len(plain)
    driver.engine.close()


def contexts_made(monkeypatch: pytest.MonkeyPatch, *, but: int = 100) -> list[bool]:
    """Return a list to which each context adds whether llama.cpp pools there. Only the first ``but`` can be made."""
    make, contexts = llama_cpp.llama_init_from_model, list[bool]()

    def note(model: Any, parameters: Any) -> Any:
        contexts.append(parameters.embeddings)
        return make(model, parameters) if len(contexts) <= but else None

    monkeypatch.setattr(llama_cpp, "llama_init_from_model", note)
    return contexts


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_made_of_states(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = contexts_made(monkeypatch)
    driver = ModelDriver(fetched(WORDS_MODEL), ctx_size=512, embeddings=True, pooling=pooling)
    # That of sequences, that of texts, and one for a moment, with which its vectors are compared.
    assert contexts == [False, False, True]
    texts = [driver.tokens(text) for text in TEXTS]
    alone = [embed(driver, text) for text in TEXTS]
    np.testing.assert_allclose(driver.backend.embed(texts), alone, atol=1e-3)
    driver.engine.close()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_llama_pools_where_the_states_are_others(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ModelDriver(fetched(WORDS_MODEL), ctx_size=512, embeddings=True, pooling=pooling)
    expected = [embed(driver, text) for text in TEXTS]
    driver.engine.close()

    monkeypatch.setattr(HiddenStates, "take", lambda self, rows: np.ones((rows, expected[0].size), np.float32))
    contexts = contexts_made(monkeypatch)
    driver = ModelDriver(fetched(WORDS_MODEL), ctx_size=512, embeddings=True, pooling=pooling)
    assert contexts == [False, False, True, True]
    for text, vector in zip(TEXTS, expected, strict=True):
        assert np.dot(embed(driver, text), vector) > 0.999, text
    driver.engine.close()


def test_a_graph_without_such_states_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiddenStates, "give_to", lambda _self, _parameters: None)
    contexts = contexts_made(monkeypatch)
    driver = ModelDriver(fetched(WORDS_MODEL), ctx_size=512, embeddings=True)
    assert contexts == [False, False, True, True]
    assert np.linalg.norm(embed(driver, TEXTS[0])) == pytest.approx(1, abs=1e-5)
    driver.engine.close()


def test_a_context_without_memory_is_a_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = contexts_made(monkeypatch, but=1)
    with pytest.raises(StartupError, match="for embeddings"):
        ModelDriver(fetched(WORDS_MODEL), ctx_size=512, embeddings=True)
    assert contexts == [False, False]
