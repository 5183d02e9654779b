"""DFlash and DSpark heads on llama.cpp: what they draft. See test_heads.py for their sequences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from caravan_shard.backends.llama.heads.file_pair import ARCHITECTURES
from caravan_shard.backends.llama.heads.states import compute_inputs, computed_inputs
from caravan_testing.seen_drafts import counts, watch_drafts
from caravan_testing.shard_builders import first_chunk, with_parameters
from caravan_testing.shard_models import (
    DFLASH_GRIDS_HEAD,
    DFLASH_HEAD,
    DFLASH_HYBRID_MODEL,
    DFLASH_MODEL,
    DSPARK_HEAD,
    HYBRID_MOE_HEAD_MODEL,
    TOKENIZER,
    VOCABULARY_SIZE,
    ModelDriver,
    fetched,
)
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama
from caravan_testing.shard_tiny_targets import write_tiny_target
from caravan_testing.tiny_dflash import Dflash, write_cyclic

pytestmark = pytest.mark.model

MOST, SIZE = 3, 64
# Dimensions of positions of a head whose model has several.
GRID = 4


def opened(model: Path, head: Path, **flags: Any) -> ModelDriver:
    return ModelDriver(
        model, **{"ctx_size": 1024, "spec_type": "auto", "model_draft": str(head), "exact": True, **flags}
    )


def begin(driver: ModelDriver, sequence_id: int, tokens: Sequence[int], most: int = MOST, **fields: Any) -> None:
    chunk = first_chunk(sequence_id, tokens, **{"max_new": 24, "ignore_eos": True, **fields})
    driver.prefill(with_parameters(chunk, max_draft_tokens=most))


class Reference:
    """The head as llama-server uses it: it has read all of a sequence, and drafts a whole block in one pass."""

    def __init__(self, model: Any, path: Path, head: Dflash) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_threads, parameters.swa_full = 256, 1, True
        self._main = llama_cpp.llama_init_from_model(model, parameters)
        self._file = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        parameters.ctx_other = self._main
        self._head = llama_cpp.llama_init_from_model(self._file, parameters)
        llama_cpp.llama_set_causal_attn(self._head, head.is_causal)
        compute_inputs(self._main, head.layers)
        vocabulary = llama_cpp.llama_model_get_vocab(self._file)
        self._unknown = llama_cpp.llama_vocab_mask(vocabulary)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._kind = head

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return ``count`` tokens that may follow ``tokens``, of which the last one is not computed."""
        for context in (self._main, self._head):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        known = len(tokens) - 1
        self._run(self._main, tokens[:-1], range(known))
        # Not in the order of places, but one layer after another.
        inputs = np.stack([computed_inputs(self._main, [layer], known, SIZE) for layer in self._kind.layers], axis=1)
        self._run(self._head, (), range(known), inputs.reshape(known, -1))
        block = [tokens[-1], *[self._unknown] * (self._kind.block - 1)]
        self._run(self._head, block, range(known, known + len(block)))
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._head), (len(block), self._vocabulary))
        found: list[int] = logits.argmax(axis=1)[0 if self._kind.from_last else 1 :].tolist()
        return found[:count]

    def _run(self, context: Any, tokens: Sequence[int], positions: range, states: Any = None) -> None:
        """Decode tokens, or let the head read states. All are of the first sequence."""
        batch = llama_cpp.llama_batch()
        batch.n_tokens = len(positions)
        planes = 1 if states is None or not self._kind.has_grids else GRID
        arrays: dict[str, Any] = {
            "pos": np.tile(np.array(positions, np.int32), (planes, 1)),
            "logits": np.full(len(positions), bool(tokens), np.int8),
        }
        arrays["pos"][GRID - 1 :] = 0
        if states is None:
            arrays["token"] = np.array(tokens, np.int32)
        else:
            arrays["embd"] = np.ascontiguousarray(states)
        for name, array in arrays.items():
            setattr(batch, name, array.ctypes.data_as(type(getattr(batch, name))))
        assert llama_cpp.llama_decode(context, batch) == 0

    def close(self) -> None:
        for context in (self._head, self._main):
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self._file)


# What the layers read matters as much as the tokens.
HEADS = {
    "plain": Dflash(state=1.0, layers=(3, 0, 2)),
    "grids": Dflash(state=1.0, layers=(3, 1), has_grids=True),
    "window": Dflash(state=1.0, window=8),
    "causal": Dflash(state=1.0, is_causal=True),
    "some tokens": Dflash(state=1.0, vocabulary=range(0, VOCABULARY_SIZE, 3)),
    "dspark": Dflash(state=1.0, markov=1.0, from_last=True),
    "dspark of a bonus": Dflash(state=1.0, markov=1.0, vocabulary=range(0, VOCABULARY_SIZE, 3)),
}


@pytest.mark.parametrize("kind", HEADS.values(), ids=list(HEADS))
def test_drafts_are_those_of_a_head_that_reads_everything(
    kind: Dflash, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are often wrong, and two blocks in one pass do not see each other."""
    written = write_tiny_llama(tmp_path / "written.gguf", Shape(layers=4, context=4096, trunk=0.1), fetched(TOKENIZER))
    model = write_cyclic(tmp_path / "model.gguf", written)
    head = kind.write(tmp_path / "head.gguf", fetched(TOKENIZER))
    driver = opened(model, head)
    seen = watch_drafts(monkeypatch)
    for number in range(2):
        begin(
            driver, number, driver.tokens(f"prompt {number} for a model that guesses what it says after the next one")
        )
    driver.decode([0, 1], max_draft_tokens=2 * MOST)
    reference = Reference(llama_cpp.llama_get_model(driver.backend._context), head, kind)
    same = [reference.draft(tokens, len(draft)) == draft for tokens, draft in seen]
    assert len({tuple(draft) for _, draft in seen}) > 5
    # The reference computes in chunks of other sizes, so a near tie may fall otherwise.
    assert sum(same) >= len(same) - 1
    reference.close()
    driver.engine.close()


WRITTEN = ("qwen3", "qwen3moe", "gpt-oss")


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_all_listed_architectures_have_drafts(architecture: str, tmp_path: Path) -> None:
    """With one whose graph lacked the layers' inputs, llama.cpp would end this process."""
    flags: dict[str, Any] = {"kv_layout": "unified", "exact": False}
    head = DFLASH_HEAD
    if architecture in WRITTEN:
        source = write_tiny_target(tmp_path / "source.gguf", architecture, fetched(TOKENIZER))
        model = write_cyclic(tmp_path / "model.gguf", source)
    elif architecture == "llama":
        model = fetched(DFLASH_MODEL)
    else:
        # Their recurrent layers make rollbacks necessary.
        flags["rollback_tokens"], head = MOST, DFLASH_GRIDS_HEAD
        if architecture == "qwen35":
            model = fetched(DFLASH_HYBRID_MODEL)
        else:
            model = write_cyclic(tmp_path / "model.gguf", fetched(HYBRID_MOE_HEAD_MODEL))
    driver = opened(model, fetched(head), **flags)
    prompts = [driver.tokens(f"prompt {number} for a model that guesses its next word") for number in range(2)]
    expected = [driver.alone(tokens, 24) for tokens in prompts]
    for number, tokens in enumerate(prompts):
        begin(driver, number, tokens)
    assert len(driver.decode([0, 1], max_draft_tokens=2 * MOST)) < 15
    assert [driver.output[0], driver.output[1]] == expected
    driver.engine.close()


@pytest.mark.parametrize("markov", [None, 30.0], ids=["dflash", "dspark"])
def test_a_head_that_is_wrong_changes_no_token(markov: float | None, tmp_path: Path) -> None:
    head = Dflash(state=100.0, markov=markov).write(tmp_path / "wrong.gguf", fetched(TOKENIZER))
    driver = opened(fetched(DFLASH_MODEL), head)
    tokens = driver.tokens("a prompt")
    expected = driver.alone(tokens, 24)
    begin(driver, 0, tokens)
    drafted, accepted = counts(driver.decode([0], max_draft_tokens=MOST))
    assert driver.output[0] == expected
    assert accepted < 0.2 * drafted
    driver.engine.close()


def test_a_draft_is_at_most_a_block() -> None:
    """A prompt of one token has drafts, too."""
    for head, longest in ((DFLASH_HEAD, 4), (DSPARK_HEAD, 5)):
        driver = opened(fetched(DFLASH_MODEL), fetched(head))
        expected = driver.alone([101], 24)
        begin(driver, 0, [101], most=8)
        results = driver.decode([0], max_draft_tokens=8)
        assert driver.output[0] == expected
        assert max(max(result.drafts.drafted) for result in results if result.drafts is not None) == longest
        assert len(results) < 10
        driver.engine.close()


def test_blocks_may_take_several_passes(tmp_path: Path) -> None:
    """With a batch of 16 tokens, a pass has one block of 16."""
    head = Dflash(block=16).write(tmp_path / "head.gguf", fetched(TOKENIZER))
    driver = opened(fetched(DFLASH_MODEL), head, batch_size=16)
    prompts = [driver.tokens(f"prompt {number}") for number in range(3)]
    expected = [driver.alone(tokens, 24) for tokens in prompts]
    for number, tokens in enumerate(prompts):
        begin(driver, number, tokens)
    assert len(driver.decode([0, 1, 2], max_draft_tokens=3 * MOST)) < 15
    assert [driver.output[number] for number in range(3)] == expected
    driver.engine.close()
