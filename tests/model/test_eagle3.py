"""EAGLE-3 heads on llama.cpp: what they draft, and which of them are refused. See test_heads.py for their sequences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from caravan_shard.backends.llama.heads.file_pair import ARCHITECTURES
from caravan_shard.backends.llama.heads.states import (
    compute_inputs,
    compute_states,
    computed_inputs,
    computed_states,
)
from caravan_shard.startup_error import StartupError
from caravan_testing.seen_drafts import watch_drafts
from caravan_testing.shard_builders import first_chunk, with_parameters
from caravan_testing.shard_models import (
    EAGLE3_HEAD,
    EAGLE3_MODEL,
    HYBRID_HEAD_MODEL,
    HYBRID_MOE_HEAD_MODEL,
    PLAIN_MODEL,
    TOKENIZER,
    ModelDriver,
    fetched,
)
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama
from caravan_testing.shard_tiny_targets import write_tiny_target
from caravan_testing.tiny_eagle3 import Eagle3

pytestmark = pytest.mark.model

MOST, SIZE = 3, 64


def opened(model: Path, head: Path, **flags: Any) -> ModelDriver:
    return ModelDriver(
        model, **{"ctx_size": 1024, "spec_type": "draft-eagle3", "model_draft": str(head), "exact": True, **flags}
    )


class Reference:
    """The head as llama-server uses it: it reads all tokens of a sequence in one pass, each at the place before it."""

    def __init__(self, model: Any, head: Path, layers: Sequence[int]) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_threads = 256, 1
        self._main = llama_cpp.llama_init_from_model(model, parameters)
        self._file = llama_cpp.llama_model_load_from_file(str(head).encode(), llama_cpp.llama_model_default_params())
        parameters.ctx_other = self._main
        self._head = llama_cpp.llama_init_from_model(self._file, parameters)
        self._layers = layers
        compute_inputs(self._main, layers)
        compute_states(self._head)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return ``count`` tokens that may follow ``tokens``, of which the last one is not computed."""
        for context in (self._main, self._head):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        computed = len(tokens) - 1
        self._run(llama_cpp.llama_decode, self._main, tokens[:-1], 0)
        # Not in the order of places, but one layer after another.
        inputs = np.stack([computed_inputs(self._main, [layer], computed, SIZE) for layer in self._layers], axis=1)
        self._run(llama_cpp.llama_encode, self._head, (), 0, inputs.reshape(computed, -1))
        states = computed_states(self._head, computed, SIZE).copy()
        new, found = list(tokens[1:]), list[int]()
        for place in range(count):
            self._run(llama_cpp.llama_decode, self._head, new, place and computed - 1 + place, states)
            states = computed_states(self._head, len(new), SIZE)[-1:].copy()
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._head), (len(new), self._vocabulary))
            new = [int(logits[-1].argmax())]
            found += new
        return found

    def _run(self, function: Any, context: Any, tokens: Sequence[int], start: int, states: Any = None) -> None:
        rows = len(tokens) or len(states)
        batch = llama_cpp.llama_batch_init(rows, 0, 1)
        batch.n_tokens = rows
        for place in range(rows):
            if tokens:
                batch.token[place] = tokens[place]
            batch.pos[place] = start + place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        held = batch.token
        if not tokens:
            batch.token = None
        if states is not None:
            states = np.ascontiguousarray(states)
            batch.embd = states.ctypes.data_as(type(batch.embd))
        assert function(context, batch) == 0
        batch.embd, batch.token = None, held
        llama_cpp.llama_batch_free(batch)

    def close(self) -> None:
        for context in (self._head, self._main):
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self._file)


@pytest.mark.parametrize("norms_input", [False, True])
def test_drafts_are_those_of_a_head_that_reads_everything(
    norms_input: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the layers read matters as much as the tokens. Drafts are often wrong, and what was read of these goes."""
    model = write_tiny_llama(tmp_path / "model.gguf", Shape(layers=4, context=4096, trunk=0.1), fetched(TOKENIZER))
    kind = Eagle3(state=1.0, layers=(3, 0, 2), norms_input=norms_input)
    head = kind.write(tmp_path / "head.gguf", fetched(TOKENIZER))
    driver = opened(model, head)
    seen = watch_drafts(monkeypatch)
    for number in range(2):
        tokens = driver.tokens(f"prompt {number} for a model that guesses what it says after the next word")
        chunk = first_chunk(number, tokens, max_new=24, ignore_eos=True)
        driver.prefill(with_parameters(chunk, max_draft_tokens=MOST))
    driver.decode([0, 1], max_draft_tokens=2 * MOST)
    reference = Reference(llama_cpp.llama_get_model(driver.backend._context), head, kind.layers)
    same = [reference.draft(tokens, len(draft)) == draft for tokens, draft in seen]
    assert len(same) > 10
    # The reference computes in chunks of other sizes, so a near tie may fall otherwise.
    assert sum(same) >= len(same) - 1
    reference.close()
    driver.engine.close()


WRITTEN = ("qwen3", "qwen3moe", "gpt-oss")
# The recurrent layers of two make rollbacks necessary.
TARGETS: dict[str, tuple[Path, dict[str, Any]]] = {
    "llama": (EAGLE3_MODEL, {}),
    "qwen35": (HYBRID_HEAD_MODEL, {"rollback_tokens": MOST}),
    "qwen35moe": (HYBRID_MOE_HEAD_MODEL, {"rollback_tokens": MOST, "kv_layout": "unified"}),
}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_all_listed_architectures_have_drafts(architecture: str, tmp_path: Path) -> None:
    """With one whose graph lacked the layers' inputs, llama.cpp would end this process."""
    if architecture in WRITTEN:
        model = write_tiny_target(tmp_path / "model.gguf", architecture, fetched(TOKENIZER))
        flags: dict[str, Any] = {"kv_layout": "unified"}
    else:
        path, flags = TARGETS[architecture]
        model = fetched(path)
    driver = opened(model, fetched(EAGLE3_HEAD), exact=False, **flags)
    prompts = [driver.tokens(f"prompt {number} for a model that guesses its next word") for number in range(2)]
    expected = [driver.alone(tokens, 24) for tokens in prompts]
    for number, tokens in enumerate(prompts):
        chunk = first_chunk(number, tokens, max_new=24, ignore_eos=True)
        driver.prefill(with_parameters(chunk, max_draft_tokens=MOST))
    assert len(driver.decode([0, 1], max_draft_tokens=2 * MOST)) < 15
    assert [driver.output[0], driver.output[1]] == expected
    driver.engine.close()


def test_a_head_that_is_wrong_changes_no_token(tmp_path: Path) -> None:
    head = Eagle3(state=100.0).write(tmp_path / "wrong.gguf", fetched(TOKENIZER))
    driver = opened(fetched(EAGLE3_MODEL), head)
    tokens = driver.tokens("a prompt")
    expected = driver.alone(tokens, 24)
    driver.prefill(with_parameters(first_chunk(0, tokens, max_new=24, ignore_eos=True), max_draft_tokens=MOST))
    results = driver.decode([0], max_draft_tokens=MOST)
    assert driver.output[0] == expected
    rows = [result.drafts for result in results if result.drafts is not None]
    assert sum(sum(row.accepted) for row in rows) < 0.2 * sum(sum(row.drafted) for row in rows)
    driver.engine.close()


def test_a_prompt_of_one_token_has_drafts() -> None:
    driver = opened(fetched(EAGLE3_MODEL), fetched(EAGLE3_HEAD))
    expected = driver.alone([100], 8)
    driver.prefill(with_parameters(first_chunk(0, [100], max_new=8, ignore_eos=True), max_draft_tokens=MOST))
    assert len(driver.decode([0], max_draft_tokens=MOST)) < 5
    assert driver.output[0] == expected
    driver.engine.close()


def test_other_files_are_refused(tmp_path: Path) -> None:
    model = fetched(EAGLE3_MODEL)
    with pytest.raises(StartupError, match=r"tiny-llama\.gguf is no EAGLE-3 head, .*: its architecture is llama"):
        opened(model, fetched(PLAIN_MODEL))
    head = Eagle3().write(tmp_path / "head.gguf", fetched(TOKENIZER))
    data = bytearray(head.read_bytes())
    start = data.index("Ġthe".encode())
    data[start : start + 5] = "Ġxyz".encode()
    head.write_bytes(data)
    with pytest.raises(StartupError, match=r"cannot draft for .*, as it has another vocabulary: its token"):
        opened(model, head)
