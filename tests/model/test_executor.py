"""`Executor` on llama.cpp: whatever is done to a conversation, it writes on as its tokens from the start would."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from caravan import LLM, Conversation, Executor, RequestError, SamplingParams
from caravan_testing.projectors import embeddings_of
from caravan_testing.shard_models import (
    DEMO_MODEL,
    HYBRID_MODEL,
    SMALL_WINDOW_MODEL,
    TIE_LOGITS,
    WINDOW_MODEL,
    WORDS_MODEL,
    fetched,
)
from caravan_testing.shard_tiny_mamba import write_tiny_mamba

pytestmark = pytest.mark.model

# One thread: see ModelDriver.
_OPTIONS = {"ctx_size": 2048, "parallel": 8, "threads": 1}
_NEW = 12


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """With random weights, and the tokenizer and template of the demo model."""
    with Executor(fetched(WORDS_MODEL), **_OPTIONS) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture(scope="module")
def demo() -> Iterator[Executor]:
    """With the demo model, for what takes texts that a model has learned."""
    with Executor(fetched(DEMO_MODEL), **_OPTIONS) as made:  # type: ignore[arg-type]
        yield made


def _written(conversation: Conversation, count: int = _NEW) -> list[int]:
    return [token.id for token in conversation.generate(count)]


def _from_the_start(executor: Executor, tokens: list[int]) -> list[int]:
    with executor.create() as conversation:
        conversation.prompt(tokens)
        return _written(conversation)


def _check_same(executor: Executor, tokens: list[int], got: list[int]) -> None:
    """Check that ``got`` is what ``tokens`` from the start give, or first differs at a tie."""
    _check_alike(executor, tokens, got, _from_the_start(executor, tokens))


def _check_alike(
    executor: Executor, tokens: list[int], got: list[int], expected: list[int], tie: float = TIE_LOGITS[WORDS_MODEL]
) -> bool:
    """Return whether ``got`` is ``expected`` after ``tokens``; if not, check that it first differs at a tie."""
    for place, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if ours != theirs:
            with executor.create() as conversation:
                conversation.prompt(tokens + got[:place])
                executor.infer()
                logits = conversation.logits()
            assert abs(logits[ours] - logits[theirs]) < tie
            return False
    return True


def test_a_fork_writes_on_as_its_tokens_would(executor: Executor) -> None:
    with executor.create() as root:
        root.prompt("The three most famous cities of France are")
        executor.infer()
        texts = {}
        for tone in (" surely", " sadly", ""):
            with root.fork() as branch:
                if tone:
                    branch.prompt(executor.tokenize(tone, add_special=False))
                tokens = branch.tokens
                texts[tone] = _written(branch)
                _check_same(executor, tokens, texts[tone])
        tokens = root.tokens
        _check_same(executor, tokens, _written(root))
        assert len(set(map(tuple, texts.values()))) == 3


_DRAWN = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, seed=2),
    SamplingParams(temperature=1.3, repetition_penalty=1.2, dry_multiplier=0.8, logit_bias={300: 2.0}, seed=3),
    SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.00001, top_n_sigma=2.0, seed=4),
    SamplingParams(temperature=1.0, samplers=["top_p", "temperature", "penalties"], top_p=0.7, seed=5),
]


def test_draws_are_those_of_the_server(executor: Executor) -> None:
    """Both ways of drawing are in use: the call for common filters, and the reference for the others."""
    params = [replace(one, max_tokens=24, ignore_eos=True) for one in _DRAWN]
    with LLM(fetched(WORDS_MODEL), kv_layout="unified", **_OPTIONS) as llm:  # type: ignore[arg-type]
        outputs = [llm.generate("The capital of France is", one)[0].outputs[0].token_ids for one in params]
    for expected, one in zip(outputs, params, strict=True):
        with executor.create() as conversation:
            conversation.prompt("The capital of France is")
            assert [token.id for token in conversation.generate(sampler=one)] == expected


def test_turns_of_messages_have_the_tokens_of_a_chat_session(demo: Executor) -> None:
    params = SamplingParams(temperature=0, max_tokens=_NEW)
    messages = [{"role": "system", "content": "Answer in one sentence."}]
    with LLM(fetched(DEMO_MODEL), **_OPTIONS) as llm, demo.create() as conversation:  # type: ignore[arg-type]
        session = llm.chat_session(messages)
        for question in ("What is the capital of France?", "And of Italy?"):
            reply = session.respond(question, params)
            messages.append({"role": "user", "content": question})
            conversation.prompt_messages(messages)
            prompt = conversation.tokens
            assert tuple(prompt) == session._awaited._state.token_ids[: reply.prompt_tokens]
            written = list(conversation.generate(sampler=params))
            ids = [token.id for token in written]
            if not _check_alike(demo, prompt, ids, list(reply.token_ids), TIE_LOGITS[DEMO_MODEL]):
                return
            messages.append({"role": "assistant", "content": "".join(token.text for token in written)})
            assert messages == session.messages


def test_a_reply_that_the_tokenizer_splits_otherwise_keeps_its_tokens(executor: Executor) -> None:
    """The reply is spelled letter by letter, where the tokenizer has words."""
    letters = {executor.tokenize(letter, add_special=False)[0]: 100.0 for letter in "the"}
    params = SamplingParams(temperature=1.0, seed=5, ignore_eos=True, logit_bias=letters)
    messages = [{"role": "user", "content": "Tell me a story."}]
    with executor.create() as conversation, executor.create() as alone:
        conversation.prompt_messages(messages)
        reply = "".join(token.text for token in conversation.generate(_NEW, params))
        assert set(reply) <= set("the")
        exact = conversation.tokens
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]
        conversation.prompt_messages(messages)
        assert conversation.tokens[: len(exact)] == exact
        assert conversation.held == len(exact)
        alone.prompt_messages(messages)
        assert alone.tokens[: len(exact)] != exact
        assert alone.text == conversation.text
        tokens = conversation.tokens
        _check_same(executor, tokens, _written(conversation))


def test_a_stop_string_spans_tokens(demo: Executor) -> None:
    with demo.create() as conversation, demo.create() as other:
        conversation.prompt("The three most famous cities of France are")
        with conversation.fork() as whole:
            tokens = list(whole.generate(_NEW))
        text = "".join(token.text for token in tokens)
        stop = tokens[4].text[-2:] + tokens[5].text[:2]
        assert text.index(stop) > 0
        stopped = list(conversation.generate(_NEW, stop=stop))
        assert [token.id for token in stopped] == [token.id for token in tokens[: len(stopped)]]
        assert "".join(token.text for token in stopped) == text[: text.index(stop)]
        other.prompt(conversation.tokens)
        demo.infer()
        assert other.sample().id == stopped[-1].id


def test_rewinding_and_shifting_equal_the_tokens_from_the_start(executor: Executor) -> None:
    with executor.create() as conversation:
        conversation.prompt("Once upon a time there was a small dragon that lived on a hill and liked to read.")
        written = _written(conversation)
        conversation.rewind(len(written) - 1)
        conversation.prompt([])
        tokens = conversation.tokens
        _check_same(executor, tokens, _written(conversation))
        conversation.shift_left(6, keep=3)
        tokens = conversation.tokens
        _check_same(executor, tokens, _written(conversation))


def test_logits_are_those_of_the_tokens_from_the_start(executor: Executor) -> None:
    with executor.create() as conversation, executor.create() as other:
        conversation.prompt("Logits of a text", all_logits=True)
        executor.infer()
        other.prompt(conversation.tokens[:-2])
        executor.infer()
        assert conversation.logits(2).dtype == np.float32
        assert np.abs(conversation.logits(2) - other.logits()).max() < TIE_LOGITS[WORDS_MODEL]
        conversation.modify(lambda tokens: tokens[:-2])
        executor.infer()
        assert np.abs(conversation.logits() - other.logits()).max() < TIE_LOGITS[WORDS_MODEL]


_CONTINUE = """
import sys
from caravan import Executor
with Executor.open(sys.argv[1], ctx_size=2048, parallel=8, threads=1) as executor:
    print(all(one.held == one.token_count for one in executor.conversations))
    for conversation in executor.conversations:
        print(*(token.id for token in conversation.generate(12)))
"""


def test_a_batch_of_eight_continues_in_a_new_process(executor: Executor, tmp_path: Path) -> None:
    batch = [executor.create() for _ in range(8)]
    for number, conversation in enumerate(batch):
        conversation.prompt(f"Chapter {number}. It was")
    while executor.infer().waiting:
        pass
    executor.save(tmp_path / "batch")
    tokens = [conversation.tokens for conversation in batch]
    expected = [_written(conversation) for conversation in batch]
    for conversation in batch:
        conversation.close()
    printed = subprocess.run(
        [sys.executable, "-c", _CONTINUE, str(tmp_path / "batch")],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    ).stdout.splitlines()
    assert printed[0] == "True"
    for before, line, written in zip(tokens, printed[1:], expected, strict=True):
        # The cells lie elsewhere in the pool there, and attention may add in another order.
        _check_alike(executor, before, list(map(int, line.split())), written)


@pytest.mark.parametrize(
    ("model", "length", "layout", "cells"),
    [
        pytest.param(WORDS_MODEL, 200, "unified", 256, id="unified"),
        pytest.param(WORDS_MODEL, 200, "split", 1024, id="split"),
        pytest.param(SMALL_WINDOW_MODEL, 200, "unified", 256, id="window"),
        pytest.param(DEMO_MODEL, 200, "unified", 256, id="demo", marks=pytest.mark.slow),
        pytest.param(WINDOW_MODEL, 700, "unified", 1024, id="gemma", marks=pytest.mark.slow),
    ],
)
def test_forks_are_opened_with_the_cells_that_they_share(
    model: Path, length: int, layout: str, cells: int, tmp_path: Path
) -> None:
    """In the unified layout there is room for them only because they share cells."""
    options = {"ctx_size": cells, "kv_layout": layout, "parallel": 4, "threads": 1}
    with Executor(fetched(model), **options) as executor:  # type: ignore[arg-type]
        root = executor.create()
        root.prompt((executor.tokenize("A long story about a river and the sea, told again. ") * 60)[:length])
        while executor.infer().waiting:
            pass
        whole = len(root.save())
        for number in range(3):
            root.fork().prompt(executor.tokenize(f"It was number {number}", add_special=False))
        while executor.infer().waiting:
            pass
        executor.save(tmp_path / "batch")
        # Each of the others has its logits, and the cells of a few tokens.
        assert (tmp_path / "batch").stat().st_size < whole + 3 * (4 * executor.vocabulary_size + whole // 10)
        with Executor.open(tmp_path / "batch", **options) as other:  # type: ignore[arg-type]
            for conversation, copy in zip(executor.conversations, other.conversations, strict=True):
                assert copy.held == copy.token_count == conversation.token_count
                for one in (conversation, copy):
                    one.prompt([5])
            executor.infer()
            other.infer()
            for conversation, copy in zip(executor.conversations, other.conversations, strict=True):
                assert np.abs(conversation.logits() - copy.logits()).max() < TIE_LOGITS[model]


@pytest.mark.parametrize("kind", ["mamba", "hybrid"])
def test_a_recurrent_model_is_cut_back_to_the_ends_of_its_prompts(kind: str, tmp_path: Path) -> None:
    path = write_tiny_mamba(tmp_path / "mamba.gguf") if kind == "mamba" else fetched(HYBRID_MODEL)
    executor = Executor(path, ctx_size=512, parallel=4, threads=1)
    with executor, executor.create() as conversation, executor.create() as other:
        tokens = [5, 6, 7, 8, 9, 10]
        conversation.prompt(tokens)
        executor.infer()
        with conversation.fork() as branch:
            branch.prompt([11])
            executor.infer()
            branch.rewind(1)
            assert branch.held == len(tokens)
            branch.prompt([12, 13])
            other.prompt([*tokens, 12, 13])
            executor.infer()
            assert np.allclose(branch.logits(), other.logits(), atol=1e-4)
            branch.rewind(3)
            assert branch.held == 0, "there is no state within the prompt"
            other.rewind(8)
            branch.prompt([])
            other.prompt(tokens[:5])
            executor.infer()
            assert np.allclose(branch.logits(), other.logits(), atol=1e-4)
        copy = executor.load(conversation.save())
        assert copy.held == len(tokens)
        params = SamplingParams(seed=1)
        assert [one.id for one in copy.generate(5, params)] == [one.id for one in conversation.generate(5, params)]


def test_the_models_own_embeddings_are_its_tokens(executor: Executor) -> None:
    table = embeddings_of(fetched(WORDS_MODEL))
    tokens = executor.tokenize("The capital of France is Paris, and that of Italy is Rome")
    with executor.create() as given, executor.create() as expected:
        given.prompt([*tokens[:3], table[tokens[3:9]], *tokens[9:]])
        expected.prompt(tokens)
        executor.infer()
        assert given.logits() == pytest.approx(expected.logits(), abs=1e-3)
        _check_alike(executor, tokens, _written(given), _written(expected))
    with executor.create() as refused, pytest.raises(RequestError, match="values for each token"):
        refused.prompt(np.zeros((1, 3), np.float32))
