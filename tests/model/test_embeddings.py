"""Embeddings of real models, also of those that only embed, compared with llama-cpp-python and with numpy."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import PoolingType

from caravan import LLM, Executor, ModelError, RequestError
from caravan_shard.backends.llama.backend import LlamaCppBackend
from caravan_shard.backends.llama.embeddings.backend import LlamaEmbeddingBackend
from caravan_shard.backends.llama.kernels.hidden_states import HiddenStates
from caravan_shard.config import ShardConfig
from caravan_shard.protocol.commands import EmbedText
from caravan_shard.protocol.results import Embedded
from caravan_shard.service.loading import backend_loader
from caravan_shard.startup_error import StartupError
from caravan_testing.shard_builders import first_chunk
from caravan_testing.shard_models import DEMO_MODEL, PLAIN_MODEL, WORDS_MODEL, ModelDriver, fetched
from caravan_testing.shard_tiny_bert import CLS, CONTEXT, SEP, TinyBert
from caravan_testing.shard_tiny_mamba import write_tiny_mamba
from caravan_testing.shard_tiny_ranker import classifier, write_tiny_ranker

pytestmark = pytest.mark.model

TEXTS = ("The capital of France is Paris.", "Paris is the capital city of France.", "def f(x): return x", "x")
# The values of llama.cpp's enum llama_pooling_type.
POOLINGS = {"mean": 1, "cls": 2, "last": 3, "model": 1}

BERT, NOMIC = TinyBert(), TinyBert(architecture="nomic-bert")
RANKER = TinyBert(pooling=PoolingType.RANK, labels=1)
MODELS = {
    "bert": BERT,
    "bert whose first token has the vector": TinyBert(pooling=PoolingType.CLS),
    "nomic-bert": NOMIC,
    "nomic-bert whose first token has the vector": replace(NOMIC, pooling=PoolingType.CLS),
}
ENCODER_TEXTS = ("the river in Paris", "what is bread?", "xyz", "a city in Spain with a bridge " * 7, "a")
# Flash attention reads keys and values as 16-bit numbers, and GELU comes from a table of such.
TOLERANCE = 5e-4


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


def opened(model: TinyBert, folder: Path, **flags: Any) -> Any:
    """Return the backend that a shard would have, without --embeddings."""
    path = model.write(folder / "model.gguf")
    return backend_loader(ShardConfig(**{"model": str(path), "threads": 1, **flags}))()


def tokens_of(backend: Any, text: str) -> list[int]:
    tokens: list[int] = backend.vocabulary.tokenize(text, add_special=True, parse_special=True)
    return tokens


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> TinyBert:
    return MODELS[request.param]


@pytest.mark.parametrize(("flags", "name"), [({}, "model.gguf"), ({"alias": "org/bert v2"}, "org/bert v2")])
def test_a_model_is_called_like_its_file_or_its_alias(flags: dict[str, str], name: str, tmp_path: Path) -> None:
    backend = opened(BERT, tmp_path, **flags)
    assert backend.facts.name == name
    backend.close()


@pytest.mark.parametrize(("flash_attn", "rounding"), [("on", TOLERANCE), ("off", 1e-6)])
def test_vectors_equal_those_of_numpy_alone_and_together(
    model: TinyBert, flash_attn: str, rounding: float, tmp_path: Path
) -> None:
    backend = opened(model, tmp_path, flash_attn=flash_attn)
    texts = [tokens_of(backend, text) for text in ENCODER_TEXTS]
    assert (texts[0][0], texts[0][-1]) == (CLS, SEP)
    expected = np.array([model.vector(text) for text in texts])
    alone = np.array([backend.embed([text])[0] for text in texts])
    np.testing.assert_allclose(alone, expected, atol=TOLERANCE)
    np.testing.assert_allclose(backend.embed(texts), alone, atol=rounding)
    np.testing.assert_allclose(backend.embed(texts[::-1]), alone[::-1], atol=rounding)
    # The texts are told apart by far more than the tolerance.
    assert np.min(np.linalg.norm(expected[:, None] - expected[None], axis=-1) + np.eye(len(texts))) > 0.1
    backend.close()


def test_lanes_compute_side_by_side_what_one_computes_alone(tmp_path: Path) -> None:
    backend = opened(BERT, tmp_path, threads=3)
    joint = backend.capacity.joint_embed
    assert (joint.texts, joint.tokens, joint.lanes, joint.lane_tokens) == (64, 128, 3, 128)
    texts = [tokens_of(backend, text) for text in ENCODER_TEXTS]
    alone = backend.embed(texts[:2]) + backend.embed(texts[2:])
    with ThreadPoolExecutor(joint.lanes) as lanes:
        for made in lanes.map(lambda lane: [backend.embed([text], lane)[0] for text in texts * 20], range(joint.lanes)):
            np.testing.assert_allclose(made, alone * 20, atol=TOLERANCE)
    backend.close()


@pytest.mark.parametrize(("ubatch", "lane_tokens"), [(8192, 512), (512, 512), (65, 128), (63, 63), (1, 1)])
def test_a_lane_has_room_for_short_texts_only(ubatch: int, lane_tokens: int, tmp_path: Path) -> None:
    backend = opened(replace(BERT, shape=replace(BERT.shape, context=1024)), tmp_path, ubatch_size=ubatch, threads=2)
    assert backend.capacity.joint_embed.lane_tokens == lane_tokens
    longest = min(lane_tokens, backend.capacity.max_embed_tokens)
    (alone,), (in_lane,) = backend.embed([[7] * longest]), backend.embed([[7] * longest], 1)
    np.testing.assert_allclose(in_lane, alone, atol=TOLERANCE)
    backend.close()


# llama.cpp ends the process where the room for tokens is no multiple of the texts that it is made for.
@pytest.mark.parametrize(
    ("ubatch", "texts", "tokens"), [(512, 64, 512), (2048, 64, 512), (65, 64, 65), (63, 63, 63), (1, 1, 1)]
)
def test_a_shared_pass_may_be_full_of_texts_or_of_tokens(ubatch: int, texts: int, tokens: int, tmp_path: Path) -> None:
    backend = opened(BERT, tmp_path, ubatch_size=ubatch)
    joint, longest = backend.capacity.joint_embed, backend.capacity.max_embed_tokens
    assert (joint.texts, joint.tokens, longest) == (texts, tokens, min(CONTEXT, tokens))
    for text, count in (([6], texts), ([7] * longest, tokens // longest)):
        made = backend.embed([text] * count)
        np.testing.assert_allclose(made, np.tile(BERT.vector(text), (count, 1)), atol=TOLERANCE)
    backend.close()


def test_there_are_no_cells_and_no_sequences(tmp_path: Path) -> None:
    backend = opened(BERT, tmp_path)
    capacity = backend.capacity
    assert type(backend) is LlamaEmbeddingBackend
    assert (capacity.generates, capacity.max_sequences, capacity.current.cells) == (False, 0, 0)
    assert (capacity.embedding_size, capacity.ranks, backend.facts.architecture) == (64, False, "bert")
    backend.close()


def test_pairs_are_ranked_as_by_numpy(tmp_path: Path) -> None:
    backend = opened(RANKER, tmp_path)
    assert (backend.capacity.ranks, backend.capacity.embedding_size) == (True, 0)
    pairs = [backend.vocabulary.pair("where is paris", document) for document in ("in france", "bread", "the river")]
    assert pairs[0] == [CLS, *tokens_of(backend, "where is paris")[1:-1], SEP, *tokens_of(backend, "in france")[1:-1]]
    expected = [[RANKER.relevance(pair)] for pair in pairs]
    np.testing.assert_allclose(backend.embed(pairs), expected, atol=TOLERANCE)
    np.testing.assert_allclose([backend.embed([pair])[0] for pair in pairs], expected, atol=TOLERANCE)
    assert len({round(relevance, 2) for (relevance,) in expected}) == 3
    backend.close()


def test_a_flag_makes_vectors_of_a_model_that_ranks(tmp_path: Path) -> None:
    backend = opened(RANKER, tmp_path, pooling="mean")
    assert (backend.capacity.ranks, backend.capacity.embedding_size) == (False, 64)
    tokens = tokens_of(backend, ENCODER_TEXTS[0])
    np.testing.assert_allclose(
        backend.embed([tokens])[0], replace(RANKER, pooling=PoolingType.MEAN).vector(tokens), atol=TOLERANCE
    )
    backend.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora": (str(DEMO_MODEL),)}, "model.gguf only embeds texts.*drop --lora"),
        ({"model_draft": str(DEMO_MODEL)}, "model.gguf only embeds texts.*drop --model-draft"),
    ],
)
def test_flags_that_such_a_model_cannot_obey_are_refused(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=message):
        opened(BERT, tmp_path, **flags)


@pytest.mark.parametrize(("token", "name"), [(CLS, r"begin \(bos\)"), (SEP, r"separator \(sep\)")])
def test_a_file_that_cannot_tokenize_is_refused(token: int, name: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=rf"the tokenizer of .*model\.gguf needs the {name} token"):
        opened(replace(BERT, unnamed=token), tmp_path)


def test_it_cannot_draft_for_another_model(tmp_path: Path) -> None:
    draft = BERT.write(tmp_path / "draft.gguf")
    config = ShardConfig(model=str(fetched(PLAIN_MODEL)), model_draft=str(draft), ctx_size=512, threads=1)
    with pytest.raises(StartupError, match=r"the draft model: draft.gguf embeds texts and cannot generate any"):
        LlamaCppBackend(config)


def test_a_text_without_a_vector_spoils_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import llama_cpp

    decode, sizes = llama_cpp.llama_decode, []

    def refuse_several(context: Any, batch: Any) -> int:
        sizes.append(batch.n_tokens)
        return -3 if batch.n_tokens > 4 else decode(context, batch)

    backend = opened(BERT, tmp_path)
    monkeypatch.setattr(llama_cpp, "llama_decode", refuse_several)
    first, none, last = backend.embed([[5, 6], [5] * 5, [7, 8, 9]])
    assert sizes == [10, 2, 5, 3]
    assert none is None
    np.testing.assert_allclose(first, BERT.vector([5, 6]), atol=TOLERANCE)
    np.testing.assert_allclose(last, BERT.vector([7, 8, 9]), atol=TOLERANCE)
    backend.close()


@pytest.mark.parametrize("name", ["a decoder", "a recurrent model"])
def test_models_that_generate_embed_several_texts_as_they_embed_one(name: str, tmp_path: Path) -> None:
    path = fetched(WORDS_MODEL) if name == "a decoder" else write_tiny_mamba(tmp_path / "mamba.gguf")
    backend = LlamaCppBackend(
        ShardConfig(model=str(path), ctx_size=512, parallel=2, embeddings=True, threads=1, flash_attn="on")
    )
    joint = backend.capacity.joint_embed
    # The texts of a recurrent model cannot share a pass.
    assert (joint.texts, joint.tokens) == (64 if name == "a decoder" else 1, 128)
    texts = [tokens_of(backend, text) for text in ENCODER_TEXTS]
    alone = np.array([backend.embed([text])[0] for text in texts])
    for start in range(0, len(texts), joint.texts):
        together = np.array(backend.embed(texts[start : start + joint.texts]))
        # Quantized weights turn differences of rounding into larger ones.
        cosines = np.sum(together * alone[start : start + joint.texts], axis=1)
        assert np.min(cosines) > 0.9995, cosines
    backend.close()


def test_the_library_embeds_and_says_why_it_does_not_generate(tmp_path: Path) -> None:
    with LLM(BERT.write(tmp_path / "bert.gguf"), threads=1) as llm:
        outputs = llm.embed(list(ENCODER_TEXTS))
        for text, output in zip(ENCODER_TEXTS, outputs, strict=True):
            expected = BERT.vector(output.prompt_token_ids)
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=TOLERANCE, err_msg=text)
        with pytest.raises(RequestError, match=r"'bert.gguf' cannot generate text, it only embeds texts"):
            llm.generate("a")
        with pytest.raises(RequestError, match=r"'bert.gguf' cannot generate text, it only embeds texts"):
            llm.chat([{"role": "user", "content": "a"}])
        (score,) = llm.score("the river", "a bridge")
        one, other = (np.array(output.outputs.embedding) for output in llm.embed(["the river", "a bridge"]))
        assert score.outputs.score == pytest.approx(float(one @ other), abs=1e-5)


def test_an_executor_cannot_step_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"bert\.gguf only embeds texts"):
        Executor(BERT.write(tmp_path / "bert.gguf"), threads=1)
