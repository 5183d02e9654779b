"""Drafts of a model's own head on llama.cpp: the same tokens in fewer steps, whatever happens to a sequence."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from caravan import LLM, EmbedsPrompt
from caravan import SamplingParams as sampled
from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.llama.heads.states import compute_states, computed_states
from caravan_shard.protocol.results import StepResult
from caravan_shard.startup_error import StartupError
from caravan_testing.always_drafts import draft_always
from caravan_testing.projectors import embeddings_of
from caravan_testing.seen_drafts import counts, watch_drafts
from caravan_testing.shard_builders import (
    first_chunk,
    load_entry,
    next_chunk,
    save_entry,
    state_entry,
    with_parameters,
    with_state,
)
from caravan_testing.shard_models import (
    DFLASH_GRIDS_HEAD,
    DFLASH_HEAD,
    DFLASH_HYBRID_MODEL,
    DFLASH_MODEL,
    DSPARK_HEAD,
    EAGLE3_HEAD,
    EAGLE3_MODEL,
    HEAD_MODEL,
    HYBRID_HEAD_MODEL,
    HYBRID_MOE_HEAD_MODEL,
    PLAIN_MODEL,
    SMALL_EAGLE3_HEAD,
    TOKENIZER,
    ModelDriver,
    fetched,
)
from caravan_testing.shard_tiny_delta_net import write_tiny_qwen35
from caravan_testing.shard_tiny_glm import write_tiny_glm
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama
from caravan_testing.tiny_dflash import Dflash, write_cyclic
from caravan_testing.tiny_eagle3 import Eagle3
from caravan_testing.tiny_heads import Heads

pytestmark = pytest.mark.model

NEW, MOST = 24, 3
OPTIONS: dict[str, Any] = {"max_new": NEW, "ignore_eos": True}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.8, top_k=40, repetition_penalty=1.1, seed=4),
}
# Rounding must not decide: these compute chunks of any size alike.
KINDS: dict[str, tuple[Path, dict[str, Any]]] = {
    "exact": (HEAD_MODEL, {"exact": True}),
    "unified": (HEAD_MODEL, {"kv_layout": "unified"}),
    "hybrid": (HYBRID_HEAD_MODEL, {"exact": True}),
    "hybrid unified": (HYBRID_HEAD_MODEL, {"kv_layout": "unified"}),
    "hybrid experts": (HYBRID_MOE_HEAD_MODEL, {"kv_layout": "unified"}),
    "eagle3": (EAGLE3_MODEL, {"exact": True, "model_draft": EAGLE3_HEAD}),
    "eagle3 unified": (EAGLE3_MODEL, {"kv_layout": "unified", "model_draft": SMALL_EAGLE3_HEAD}),
    "eagle3 hybrid": (HYBRID_HEAD_MODEL, {"exact": True, "model_draft": EAGLE3_HEAD}),
    "dflash": (DFLASH_MODEL, {"exact": True, "model_draft": DFLASH_HEAD}),
    "dflash hybrid": (DFLASH_HYBRID_MODEL, {"exact": True, "model_draft": DFLASH_GRIDS_HEAD}),
    "dspark unified": (DFLASH_MODEL, {"kv_layout": "unified", "model_draft": DSPARK_HEAD}),
}
SPEC_TYPES = {
    None: "draft-mtp",
    EAGLE3_HEAD: "draft-eagle3",
    SMALL_EAGLE3_HEAD: "draft-eagle3",
    DFLASH_HEAD: "draft-dflash",
    DFLASH_GRIDS_HEAD: "draft-dflash",
    DSPARK_HEAD: "draft-dspark",
}
# A model with a head in its file, and those whose head is another file.
EACH: dict[str, tuple[Path, dict[str, Any]]] = {
    "mtp": (HEAD_MODEL, {}),
    "eagle3": (EAGLE3_MODEL, {"model_draft": EAGLE3_HEAD}),
    "dflash": (DFLASH_MODEL, {"model_draft": DFLASH_HEAD}),
    "dspark": (DFLASH_MODEL, {"model_draft": DSPARK_HEAD}),
}


def of_head(model_draft: Path | None = None, **flags: Any) -> dict[str, Any]:
    """Return the flags of a shard that drafts with the model's own head, or the one in the file ``model_draft``."""
    found = {"spec_type": SPEC_TYPES.get(model_draft, "auto"), **flags}
    return found if model_draft is None else {"model_draft": str(fetched(model_draft)), **found}


def opened(model: Path, **flags: Any) -> ModelDriver:
    return ModelDriver(model, **{"ctx_size": 1024, "rollback_tokens": MOST, **of_head(**flags)})


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def driver(request: pytest.FixtureRequest) -> Iterator[ModelDriver]:
    model, flags = request.param
    driver = opened(fetched(model), **flags)
    yield driver
    driver.engine.close()


def prompt(driver: ModelDriver, number: int = 0) -> list[int]:
    return driver.tokens(f"prompt {number} for a model that guesses what it says after the next word")


def begin(driver: ModelDriver, sequence_id: int, tokens: Sequence[int], **fields: Any) -> None:
    chunk = first_chunk(sequence_id, tokens, **{**OPTIONS, **fields})
    driver.prefill(with_parameters(chunk, max_draft_tokens=MOST))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_change_no_token(driver: ModelDriver, sampling: SamplingParams) -> None:
    outputs, results = [], list[StepResult]()
    for most in (0, MOST):
        driver.engine.release_all()
        for number in range(3):
            begin(driver, number, prompt(driver, number), sampling=sampling)
        results = driver.decode([0, 1, 2], max_draft_tokens=3 * most)
        outputs.append({number: list(driver.output[number]) for number in range(3)})
    assert outputs[0] == outputs[1]
    drafted, accepted = counts(results)
    assert accepted > 0.6 * drafted
    assert len(results) < 0.6 * NEW


class Reference:
    """The head as llama-server uses it: it reads every token of a sequence, in one pass."""

    def __init__(self, model: Any, cells: int) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_threads = cells, 1
        self._main = llama_cpp.llama_init_from_model(model, parameters)
        parameters.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        self._head = llama_cpp.llama_init_from_model(model, parameters)
        for context in (self._main, self._head):
            compute_states(context)
        self._size = llama_cpp.llama_model_n_embd_out(model)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return ``count`` tokens that may follow ``tokens``, of which the last one is not computed."""
        for context in (self._main, self._head):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        self._decode(self._main, tokens[:-1], 0)
        states = computed_states(self._main, len(tokens) - 1, self._size)
        read = np.concatenate([np.zeros((1, self._size), np.float32), states])
        found: list[int] = []
        new = list(tokens)
        for _ in range(count):
            self._decode(self._head, new, len(tokens) + len(found) - len(new), read)
            read = computed_states(self._head, len(new), self._size)[-1:].copy()
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._head), (self._vocabulary,))
            new = [int(logits.argmax())]
            found += new
        return found

    def _decode(self, context: Any, tokens: Sequence[int], start: int, states: Any = None) -> None:
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place == len(tokens) - 1
        if states is not None:
            batch.embd = np.ascontiguousarray(states).ctypes.data_as(type(batch.embd))
        assert llama_cpp.llama_decode(context, batch) == 0
        batch.embd = None
        llama_cpp.llama_batch_free(batch)

    def close(self) -> None:
        for context in (self._main, self._head):
            llama_cpp.llama_free(context)


@pytest.mark.parametrize("write", [write_tiny_glm, write_tiny_qwen35], ids=["glm4moe", "qwen35"])
def test_drafts_are_those_of_a_head_that_reads_everything(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states matter as much as its tokens. Drafts are often wrong, and what was read of these is read again."""
    driver = opened(write(tmp_path / "model.gguf", fetched(TOKENIZER), Heads(trunk=0.02, state=0.5)), exact=True)
    seen = watch_drafts(monkeypatch)
    for number in range(2):
        begin(driver, number, prompt(driver, number))
    drafted, accepted = counts(driver.decode([0, 1], max_draft_tokens=2 * MOST))
    assert accepted < drafted
    reference = Reference(llama_cpp.llama_get_model(driver.backend._context), 256)
    same = [reference.draft(tokens, len(draft)) == draft for tokens, draft in seen]
    assert len(same) > 10
    # The reference computes in chunks of other sizes, so a near tie may fall otherwise.
    assert sum(same) >= len(same) - 1
    reference.close()
    driver.engine.close()


# As some of `EACH`, but what the model computes matters as much to the head as the token, so that it is often wrong.
OFTEN_WRONG: dict[str, Callable[[Path], tuple[Path, Path | None]]] = {
    "mtp": lambda folder: (
        write_tiny_glm(folder / "model.gguf", fetched(TOKENIZER), Heads(trunk=0.02, state=0.5)),
        None,
    ),
    "eagle3": lambda folder: (
        write_tiny_llama(folder / "model.gguf", Shape(layers=4, context=4096, trunk=0.1), fetched(TOKENIZER)),
        Eagle3(state=1.0).write(folder / "head.gguf", fetched(TOKENIZER)),
    ),
    "dflash": lambda folder: (
        write_cyclic(
            folder / "model.gguf",
            write_tiny_llama(folder / "written.gguf", Shape(layers=4, context=4096, trunk=0.1), fetched(TOKENIZER)),
        ),
        Dflash(state=1.0).write(folder / "head.gguf", fetched(TOKENIZER)),
    ),
}


@pytest.mark.parametrize("write", OFTEN_WRONG.values(), ids=OFTEN_WRONG)
def test_drafts_are_those_of_a_new_sequence(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a sequence was computed in parts, rewound, or begins as a copy, some with others in the same passes."""
    model, head = write(tmp_path)
    driver = opened(model, kv_layout="unified", model_draft=head)
    tokens = [*prompt(driver, 0), *prompt(driver, 1)]
    seen = watch_drafts(monkeypatch)
    for start in range(0, len(tokens), 8):
        part, last = tokens[start : start + 8], start + 8 >= len(tokens)
        if start:
            driver.prefill(next_chunk(0, start, part, last=last))
        else:
            begin(driver, 0, part, total=len(tokens), last=last)
    begin(driver, 1, prompt(driver, 2))
    driver.decode([0, 1], steps=12, max_draft_tokens=2 * MOST)
    for length, copies in ((len(tokens) + 4, [0]), (len(tokens) - 3, [0]), (len(tokens) - 5, [2, 3])):
        driver.prefill(park={0: length})
        for key in copies:
            begin(driver, key, [90 + key], copy=PrefixCopy(source_id=0, length=length))
        driver.decode([*copies, 1], steps=8, max_draft_tokens=3 * MOST)
    noted, compared = list(seen), list[bool]()
    for before, draft in noted:
        driver.engine.release_all()
        seen.clear()
        begin(driver, 0, before[:-1])
        driver.decode([0], steps=1 + MOST, max_draft_tokens=MOST)
        # The last steps had short drafts. Some steps have none, to see what that costs.
        compared += [expected[: len(draft)] == draft for tokens, expected in seen if tokens == before]
    assert len(compared) > 30
    # Passes of other sizes round otherwise, so a near tie may fall otherwise.
    assert sum(compared) >= len(compared) - 2
    driver.engine.close()


def test_a_head_that_is_wrong_changes_no_token(tmp_path: Path) -> None:
    driver = opened(write_tiny_glm(tmp_path / "wrong.gguf", fetched(TOKENIZER), Heads(trunk=1.0)), exact=True)
    tokens = prompt(driver)
    expected = driver.alone(tokens, NEW)
    begin(driver, 0, tokens)
    drafted, accepted = counts(driver.decode([0], max_draft_tokens=MOST))
    assert driver.output[0] == expected
    assert accepted < 0.2 * drafted
    driver.engine.close()


def test_a_saved_sequence_goes_on_with_drafts(driver: ModelDriver) -> None:
    """The head has not seen what was loaded: it begins where the model goes on."""
    tokens = prompt(driver)
    expected = driver.alone(tokens, NEW)
    begin(driver, 0, tokens)
    driver.decode([0], steps=6, max_draft_tokens=MOST)
    got = list(driver.output[0])
    held = [*tokens, *got[:-1]]
    entries = [save_entry(0, held)]
    if driver.backend.capacity.current.whole_only:
        entries.append(state_entry(0, held))
    assert all(driver.save(*entries))
    driver.engine.release_all()
    entry = load_entry(1, held)
    assert driver.load(with_state(entry, held) if len(entries) > 1 else entry) == [True]
    copy = PrefixCopy(source_id=1, length=len(held))
    begin(driver, 1, got[-1:], copy=copy, max_new=NEW - len(got))
    results = driver.decode([1], max_draft_tokens=MOST)
    assert [*got, *driver.output[1]] == expected
    drafted, accepted = counts(results)
    assert accepted > 0.5 * drafted > 0


def test_copies_go_on_with_drafts(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    begin(driver, 0, tokens)
    driver.decode([0], steps=6, max_draft_tokens=MOST)
    got = list(driver.output[0])
    held = [*tokens, *got[:-1]]
    driver.prefill(park={0: len(held)})
    for key, first in ((1, got[-1]), (2, 90)):
        begin(driver, key, [first], copy=PrefixCopy(source_id=0, length=len(held)))
    results = driver.decode([1, 2], max_draft_tokens=2 * MOST)
    outputs = dict(driver.output)
    drafted, accepted = counts(results)
    assert accepted > 0.5 * drafted > 0
    assert len(results) < 0.6 * NEW
    for key, first in ((1, got[-1]), (2, 90)):
        assert outputs[key] == driver.alone([*held, first], NEW)


@pytest.mark.parametrize(("model", "flags"), EACH.values(), ids=list(EACH))
def test_a_rewound_sequence_goes_on_with_drafts(model: Path, flags: dict[str, Any]) -> None:
    driver = opened(fetched(model), exact=True, **flags)
    tokens = prompt(driver)
    begin(driver, 0, tokens)
    driver.decode([0], max_draft_tokens=MOST)
    begin(driver, 0, [90], copy=PrefixCopy(source_id=0, length=len(tokens) - 2))
    results = driver.decode([0], max_draft_tokens=MOST)
    output = list(driver.output[0])
    assert output == driver.alone([*tokens[:-2], 90], NEW)
    drafted, accepted = counts(results)
    assert accepted > 0.5 * drafted > 0
    driver.engine.close()


@pytest.mark.parametrize(("model", "flags"), EACH.values(), ids=list(EACH))
def test_in_another_layout_sequences_go_on_with_drafts(model: Path, flags: dict[str, Any]) -> None:
    driver = opened(fetched(model), **flags)
    prompts = [prompt(driver, number) for number in range(3)]
    expected = [driver.alone(one, NEW) for one in prompts]
    for number, tokens in enumerate(prompts):
        begin(driver, number, tokens)
    driver.decode([0, 1, 2], steps=6, max_draft_tokens=3 * MOST)
    assert driver.set_layout(KvLayout.UNIFIED) == []
    results = driver.decode([0, 1, 2], max_draft_tokens=3 * MOST)
    drafted, accepted = counts(results)
    assert accepted > 0.5 * drafted > 0
    for number, tokens in enumerate(prompts):
        driver.check_same(tokens, expected[number], driver.output[number])
    driver.engine.close()


@pytest.mark.parametrize("head", [None, EAGLE3_HEAD, DFLASH_GRIDS_HEAD], ids=["mtp", "eagle3", "dflash"])
def test_behind_embeddings_the_head_goes_on_with_tokens(head: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a library's model, whose drafts need not pay here."""
    draft_always(monkeypatch)
    model = fetched(DFLASH_HYBRID_MODEL if head is DFLASH_GRIDS_HEAD else HYBRID_HEAD_MODEL)
    rows = embeddings_of(model).astype(np.float32)[100:140]
    params = sampled(temperature=0, max_tokens=NEW, ignore_eos=True)
    outputs = []
    kinds: list[dict[str, Any]] = [{}, of_head(head, speculate=MOST)]
    for options in kinds:
        with LLM(str(model), enable_prompt_embeds=True, parallel=2, ctx_size=1024, threads=1, **options) as llm:
            outputs.append(
                [one.outputs[0].token_ids for one in llm.generate([EmbedsPrompt(prompt_embeds=rows)], params)]
            )
    assert outputs[0] == outputs[1]


def test_a_model_without_a_head_is_refused_or_drafts_otherwise() -> None:
    with pytest.raises(StartupError, match=r"tiny-llama\.gguf cannot draft by itself .* no head"):
        opened(fetched(PLAIN_MODEL))
    driver = opened(fetched(PLAIN_MODEL), spec_type="auto")
    assert driver.backend.draft_model is None
    driver.engine.close()


@pytest.mark.parametrize(
    ("model", "head", "spec_type", "reason"),
    [
        (EAGLE3_MODEL, EAGLE3_HEAD, "none", r"tiny-eagle3\.gguf is an EAGLE-3 head: pass --spec-type draft-eagle3"),
        (DFLASH_MODEL, DFLASH_HEAD, "none", r"tiny-dflash\.gguf is a DFlash head: pass --spec-type draft-dflash"),
        (DFLASH_MODEL, DFLASH_HEAD, "draft-dspark", r"tiny-dflash\.gguf is a DFlash head: pass .* draft-dflash"),
        (HEAD_MODEL, EAGLE3_HEAD, "draft-eagle3", r"no hidden states can be read from .* glm4moe yet"),
        (HEAD_MODEL, DFLASH_HEAD, "draft-dflash", r"no hidden states can be read from .* glm4moe yet"),
        # It has two layers.
        (PLAIN_MODEL, EAGLE3_HEAD, "auto", r"it must read 3 of the model's layers 0 to 1\. Given: 0, 2, 3"),
        (PLAIN_MODEL, DFLASH_HEAD, "auto", r"it must read some of the model's layers 0 to 1\. Given: 0, 2, 3"),
    ],
)
def test_a_head_of_another_model_is_refused(model: Path, head: Path, spec_type: str, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        opened(fetched(model), model_draft=head, spec_type=spec_type)


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (HYBRID_HEAD_MODEL, {}),
        (HYBRID_HEAD_MODEL, {"model_draft": EAGLE3_HEAD}),
        (DFLASH_HYBRID_MODEL, {"model_draft": DFLASH_GRIDS_HEAD}),
    ],
)
def test_the_head_of_a_model_that_cannot_be_cut_back_is_not_used(model: Path, flags: dict[str, Any]) -> None:
    driver = opened(fetched(model), rollback_tokens=0, **flags)
    assert driver.backend.draft_model is None
    assert driver.backend.facts.draft_model == ""
    driver.engine.close()


@pytest.mark.parametrize(
    ("model", "flags", "name"),
    [
        (*EACH["mtp"], "tiny-glm4moe.gguf (MTP)"),
        (*EACH["eagle3"], "tiny-eagle3.gguf (EAGLE-3)"),
        (*EACH["dflash"], "tiny-dflash.gguf (DFlash)"),
        (*EACH["dspark"], "tiny-dspark.gguf (DSpark)"),
    ],
    ids=list(EACH),
)
def test_the_facts_name_the_head(model: Path, flags: dict[str, Any], name: str) -> None:
    driver = opened(fetched(model), **flags)
    assert driver.backend.facts.draft_model == name
    driver.engine.close()
