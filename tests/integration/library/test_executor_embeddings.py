"""Embeddings as prompts of conversations, with the toy model, whose embeddings are its token ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan import AsyncExecutor, Embeddings, Executor, RequestError
from caravan_shard.backends.toy.model import BOS

_TEXT = b"as embeddings"


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor("toy.gguf", backend="fake", parallel=4, ctx_size=1024) as opened:
        yield opened


def _rows(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8).astype(np.float32).reshape(-1, 1)


def _ids(conversation: Any, count: int = 8) -> list[int]:
    return [token.id for token in conversation.generate(count)]


def test_embeddings_count_as_the_tokens_that_they_stand_for(executor: Executor) -> None:
    expected, given, mixed = (executor.create() for _ in range(3))
    expected.prompt(_TEXT.decode())
    given.prompt([BOS, _rows(_TEXT)])
    mixed.prompt([BOS, Embeddings.of(_rows(_TEXT[:4]).astype(np.float64)), *_TEXT[4:9], _rows(_TEXT[9:])])
    assert given.token_count == expected.token_count == len(_TEXT) + 1
    assert _ids(given) == _ids(mixed) == _ids(expected)
    # Nothing is put before them.
    alone = executor.create()
    alone.prompt(_rows(b"x"))
    assert alone.token_count == 1


def test_they_are_forked_cut_moved_and_saved(executor: Executor, tmp_path: Path) -> None:
    conversation = executor.create()
    conversation.prompt([BOS, _rows(_TEXT)])
    executor.infer()
    fork = conversation.fork()
    fork.rewind(4)
    fork.prompt(list(_TEXT[-4:]))
    path = tmp_path / "saved"
    conversation.unload()
    conversation.save(path)
    again = executor.load(path)
    assert again.tokens == conversation.tokens
    executor.infer()
    for one in (fork, conversation, again):
        one.prompt("!")
    assert _ids(fork) == _ids(conversation) == _ids(again)
    for one in executor.conversations:
        one.close()
    # The file has them.
    restored = executor.load(path)
    assert _ids(restored, 2)


@pytest.mark.parametrize("projector", ["", "toy", "toy-atomic"])
def test_more_than_a_step_has_room_for_are_computed_in_parts(projector: str) -> None:
    text = bytes(range(97, 117)) * 10
    with Executor("toy.gguf", backend="fake", parallel=2, ctx_size=1024, batch_size=64, mmproj=projector) as executor:
        expected, given = executor.create(), executor.create()
        expected.prompt([BOS, *text])
        given.prompt([BOS, _rows(text)])
        steps = 1
        while executor.infer().waiting:
            steps += 1
            assert steps < 20
        assert _ids(given) == _ids(expected)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 3), np.float32), "embeddings of this model have 1 values for each token. Given: 3"),
        (np.zeros(3, np.float32), "embeddings must be floats [tokens, size]. Given: float32 [3]"),
        (np.zeros((0, 1), np.float32), "embeddings must be floats [tokens, size]"),
        (np.full((1, 1), np.nan), "embeddings must have values between -65504 and 65504"),
    ],
)
def test_wrong_embeddings_are_refused(executor: Executor, rows: Any, message: str) -> None:
    conversation = executor.create()
    with pytest.raises(RequestError) as refused:
        conversation.prompt(rows)
    assert message in str(refused.value)
    assert conversation.token_count == 0


async def test_asyncio_has_them_too() -> None:
    async with AsyncExecutor("toy.gguf", backend="fake") as executor:
        conversation = await executor.create()
        await conversation.prompt([BOS, _rows(_TEXT)])
        await executor.infer()
        assert (await conversation.sample()).id < 260
