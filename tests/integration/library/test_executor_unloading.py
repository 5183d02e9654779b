"""`Executor(unload_idle=True)` over the toy model: conversations give way to others, and come back with their cells."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import caravan.executor
from caravan import AsyncConversation, AsyncExecutor, Conversation, Executor, State
from caravan_shard.backends.toy.backend import ToyBackend

_SMALL: dict[str, Any] = {"backend": "fake", "ctx_size": 64, "parallel": 3, "batch_size": 16, "unload_idle": True}


def _executor(**options: Any) -> Executor:
    return Executor("toy.gguf", **(_SMALL | options))


@pytest.fixture(params=[0, 8192], ids=["recomputed", "host memory"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with _executor(cache_ram=request.param) as made:
        yield made


def _prompted(executor: Executor, *prompts: list[int]) -> list[Conversation]:
    made = []
    for prompt in prompts:
        made.append(executor.create())
        made[-1].prompt(prompt)
        _infer_all(executor)
    return made


def _infer_all(executor: Executor) -> None:
    while (did := executor.infer()).waiting:
        pass
    assert did.starved == ()


def _written(conversation: Conversation, count: int = 4) -> list[int]:
    return [token.id for token in conversation.generate(count, stop=lambda _: False)]


def _expected(tokens: list[int], count: int = 4) -> list[int]:
    with _executor(unload_idle=False) as other:
        (conversation,) = _prompted(other, tokens)
        return _written(conversation, count)


def test_the_one_that_was_used_longest_ago_gives_up_its_sequence(executor: Executor) -> None:
    first, second, third = _prompted(executor, [1], [2], [3])
    first.prompt([9])
    _infer_all(executor)
    (fourth,) = _prompted(executor, [4])
    assert [one.held for one in (first, second, third, fourth)] == [2, 0, 1, 1]
    assert second.state is State.READY
    assert _written(second) == _expected([2])
    assert [one.held > 0 for one in (first, second, third, fourth)] == [True, True, False, True]


def test_cells_give_way_too_and_the_texts_stay(executor: Executor) -> None:
    prompts = [list(range(start, start + 30)) for start in (0, 40, 80, 120)]
    conversations = _prompted(executor, *prompts)
    assert sum(one.held for one in conversations) <= 64
    for _ in range(2):
        for conversation, prompt in zip(conversations, prompts, strict=True):
            tokens = conversation.tokens
            assert _written(conversation) == _expected(tokens)
            assert conversation.tokens[:30] == prompt


def test_only_what_is_new_is_computed_where_there_is_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0
    with _executor(cache_ram=64) as executor:
        first, *_ = _prompted(executor, *(list(range(start, start + 30)) for start in (0, 40, 80)))
        assert first.held == 0
        decode = executor.backend.decode

        def counted(batch: Any) -> Any:
            nonlocal computed
            computed += len(batch.tokens)
            return decode(batch)

        monkeypatch.setattr(executor.backend, "decode", counted)
        # Both steps try before somebody gives way.
        first.rewind(3)
        first.prompt([7])
        _infer_all(executor)
        assert (first.held, computed) == (28, 1)
        first.unload()
        first.modify(lambda tokens: [*tokens[:10], 5])
        _infer_all(executor)
        assert (first.held, computed) == (11, 2)
        assert _written(first) == _expected([*range(10), 5])


def test_a_fork_shares_what_comes_back() -> None:
    with _executor() as executor:
        (root,) = _prompted(executor, list(range(30)))
        fork = root.fork()
        fork.prompt([200])
        _infer_all(executor)
        assert isinstance(executor.backend, ToyBackend)
        assert executor.backend.cache.used == 31
        fork.unload()
        fork.prompt([201])
        _infer_all(executor)
        assert (fork.held, executor.backend.cache.used) == (32, 32)
        other, _ = _prompted(executor, [1], [2])
        assert [one.held for one in executor.conversations] == [0, 32, 1, 1]
        assert fork.fork().held == 32
        assert (fork.held, other.held) == (32, 0)
        again = root.fork()
        again.prompt([9])
        _infer_all(executor)
        assert (again.held, executor.backend.cache.used) == (31, 34)


def test_two_that_cannot_be_computed_together_are_computed_in_turn(executor: Executor) -> None:
    first, second = executor.create(), executor.create()
    first.prompt(list(range(50)))
    second.prompt(list(range(100, 150)))
    _infer_all(executor)
    assert [one.state for one in (first, second)] == [State.READY] * 2
    assert _written(second) == _expected([*range(100, 150)])


async def test_generations_at_the_same_time_take_turns() -> None:
    async def written(conversation: AsyncConversation) -> list[int]:
        return [token.id async for token in conversation.generate(12, stop=lambda _: False)]

    async with AsyncExecutor("toy.gguf", **_SMALL) as executor:
        conversations = [await executor.create() for _ in range(5)]
        for number, conversation in enumerate(conversations):
            await conversation.prompt(list(range(30 * number, 30 * number + 20)))
        outputs = await asyncio.gather(*map(written, conversations))
    assert outputs == [_expected([*range(30 * number, 30 * number + 20)], 12) for number in range(5)]


@pytest.mark.parametrize("kind", ["toy", "toy-atomic"])
def test_images_come_back(kind: str) -> None:
    from caravan_testing.media_prompts import spelled_picture

    image = caravan.Picture.of(*spelled_picture("a cat"))
    with _executor(mmproj=kind, batch_size=64) as executor:
        shown, words = executor.create(), executor.create()
        shown.prompt(["see ", image, "!"])
        words.prompt("see a cat!")
        _infer_all(executor)
        shown.unload()
        _prompted(executor, list(range(40)))
        assert _written(shown) == _written(words)
        assert np.array_equal(shown.logits(), words.logits())


def test_a_fork_has_its_own_states_to_be_cut_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    recurrent = ToyBackend(cells=128, max_sequences=3, whole_only=True)
    monkeypatch.setattr(caravan.executor, "load_backend", lambda _config: recurrent)
    with _executor() as executor:
        (root,) = _prompted(executor, list(range(20)))
        root.unload()
        fork = root.fork()
        root.prompt(list(range(100, 105)))
        fork.prompt(list(range(200, 210)))
        _infer_all(executor)
        fork.rewind(3)
        assert fork.held == 20
        fork.prompt([])
        _infer_all(executor)
        written = _written(fork)
    monkeypatch.undo()
    assert written == _expected([*range(20), *range(200, 207)])
