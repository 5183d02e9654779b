"""Models that only embed, such as BERT, compared with the same networks in numpy."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import PoolingType

from caravan import LLM, Executor, ModelError, RequestError
from caravan_shard.backends.base import StartupError
from caravan_shard.backends.llama.backend import LlamaCppBackend
from caravan_shard.backends.llama.embeddings.backend import LlamaEmbeddingBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service.loading import backend_loader
from caravan_testing.shard_models import DEMO_MODEL, PLAIN_MODEL, WORDS_MODEL, fetched
from caravan_testing.shard_tiny_bert import CLS, CONTEXT, SEP, TinyBert
from caravan_testing.shard_tiny_mamba import write_tiny_mamba

pytestmark = pytest.mark.model

BERT, NOMIC = TinyBert(), TinyBert(architecture="nomic-bert")
RANKER = TinyBert(pooling=PoolingType.RANK, labels=1)
MODELS = {
    "bert": BERT,
    "bert whose first token has the vector": TinyBert(pooling=PoolingType.CLS),
    "nomic-bert": NOMIC,
    "nomic-bert whose first token has the vector": replace(NOMIC, pooling=PoolingType.CLS),
}
TEXTS = ("the river in Paris", "what is bread?", "xyz", "a city in Spain with a bridge " * 7, "a")
# Flash attention reads keys and values as 16-bit numbers, and GELU comes from a table of such.
TOLERANCE = 5e-4


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
    texts = [tokens_of(backend, text) for text in TEXTS]
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
    texts = [tokens_of(backend, text) for text in TEXTS]
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
    tokens = tokens_of(backend, TEXTS[0])
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
    texts = [tokens_of(backend, text) for text in TEXTS]
    alone = np.array([backend.embed([text])[0] for text in texts])
    for start in range(0, len(texts), joint.texts):
        together = np.array(backend.embed(texts[start : start + joint.texts]))
        # Quantized weights turn differences of rounding into larger ones.
        cosines = np.sum(together * alone[start : start + joint.texts], axis=1)
        assert np.min(cosines) > 0.9995, cosines
    backend.close()


def test_the_library_embeds_and_says_why_it_does_not_generate(tmp_path: Path) -> None:
    with LLM(BERT.write(tmp_path / "bert.gguf"), threads=1) as llm:
        outputs = llm.embed(list(TEXTS))
        for text, output in zip(TEXTS, outputs, strict=True):
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
