"""`AsyncExecutor` over the toy model: equal to `Executor`, and consistent when calls are cancelled or it is closed."""

import asyncio
import filecmp
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

import caravan
from caravan import AsyncConversation, AsyncExecutor, Conversation, Executor, SamplingParams, State
from caravan_testing.waiting import DEADLINE_S, eventually

_SMALL = {"backend": "fake", "ctx_size": 64, "parallel": 4, "batch_size": 16, "cache_ram": 0}
_GREEDY = SamplingParams(temperature=0)

# What users do not call, and properties that are awaited.
_OF_EXECUTOR = {"chat_prompts", "check", "end", "save_all"}
_OF_CONVERSATION = {"waiting", "steps", "first_output", "advance", "note_held", "saved", "restore", "generation"}


def _executor(**options: object) -> AsyncExecutor:
    return AsyncExecutor("toy.gguf", **(_SMALL | options))  # type: ignore[arg-type]


@pytest.fixture
async def executor() -> AsyncIterator[AsyncExecutor]:
    async with _executor() as made:
        yield made


class Gate:
    """A sampler that runs until it is released."""

    def __init__(self) -> None:
        self.started, self.released = threading.Event(), threading.Event()

    def __call__(self, _logits: NDArray[np.float32]) -> int:
        self.started.set()
        assert self.released.wait(DEADLINE_S)
        return 7

    async def until_started(self) -> None:
        await eventually(self.started.is_set)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.released.set()


def _threads() -> list[str]:
    """Return the names of the threads of executors."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("caravan-executor")]


async def _ready(executor: AsyncExecutor, prompt: str = "ready") -> AsyncConversation:
    conversation = await executor.create()
    await conversation.prompt(prompt)
    await executor.infer()
    return conversation


@pytest.mark.parametrize(
    ("plain", "awaited", "internal"),
    [(Executor, AsyncExecutor, _OF_EXECUTOR), (Conversation, AsyncConversation, _OF_CONVERSATION)],
)
def test_every_call_is_there_with_its_parameters(plain: type, awaited: type, internal: set[str]) -> None:
    names = {name for name in vars(plain) if not name.startswith("_")} - internal
    assert names == {name for name in vars(awaited) if not name.startswith("_")}
    for name in names - {"text", "media", "conversations"}:
        ours, theirs = inspect.getattr_static(awaited, name), inspect.getattr_static(plain, name)
        assert isinstance(ours, property) == isinstance(theirs, property)
        if callable(theirs):
            expected, got = (list(inspect.signature(one).parameters.values()) for one in (theirs, ours))
            assert [(one.name, one.default) for one in got] == [(one.name, one.default) for one in expected]
            assert ours.__doc__


async def _outcome(call: Callable[[], Any]) -> object:
    """Return what a call does in a form that can be compared: its result, or the type of its error."""
    try:
        result = call()
        if isinstance(result, Awaitable):
            result = await result
        elif isinstance(result, AsyncIterator):
            result = [item async for item in result]
        elif isinstance(result, Iterator):
            result = list(result)
    except (caravan.CaravanError, ValueError, IndexError) as error:
        return type(error), str(error)
    if isinstance(result, np.ndarray):
        return result.tobytes()
    if isinstance(result, caravan.Inference):
        return [[one.tokens for one in group] for group in (result.done, result.waiting, result.starved)]
    return [item.tokens for item in result] if isinstance(result, tuple) else result


async def _does(executor: Any, path: Path) -> list[object]:
    """Return what a program of all calls gives, with an executor of either kind."""

    async def made(call: Any) -> Any:
        return await call if isinstance(call, Awaitable) else call

    async def told(call: Callable[[], Any]) -> None:
        results.append(await _outcome(call))

    def value(name: Any) -> Any:
        return name() if callable(name) else name

    results: list[object] = []
    first, second = await made(executor.create()), await made(executor.create())
    await told(lambda: first.logits())
    await told(lambda: first.prompt("a prompt of 21 bytes", all_logits=True))
    await told(lambda: second.prompt([1, 2, 3]))
    await told(lambda: first.prompt("again"))
    third = await made(first.fork())
    for _ in range(5):
        await told(executor.infer)
    await told(lambda: first.logits(3))
    await told(lambda: first.logits(99))
    await told(lambda: first.sample(SamplingParams(seed=3, temperature=1.5)))
    await told(lambda: first.sample(lambda logits: int(logits.argmin())))
    await told(lambda: first.rewind(2))
    await told(lambda: second.rewind(9))
    await told(lambda: third.shift_left(2, keep=1))
    await told(lambda: third.generate(5, _GREEDY, stop=lambda token: token.id == 300))
    await told(lambda: second.modify(lambda tokens: [*tokens, 9]))
    await told(lambda: second.modify(lambda tokens: [999]))
    await told(executor.infer)
    fourth = await made(executor.load(await made(second.save())))
    await told(lambda: executor.load(b"nothing"))
    await told(lambda: fourth.generate(8))
    await told(lambda: executor.tokenize("text", add_special=False))
    await told(lambda: executor.save(path))
    await told(lambda: value(executor.conversations))
    await made(second.unload())
    await made(first.close())
    await made(first.close())
    await told(lambda: first.sample())
    results += [(one.state, one.tokens, one.token_count) for one in (first, second, third, fourth)]
    for conversation in (first, third):
        await told(lambda one=conversation: value(one.text))  # type: ignore[misc]
    return [*results, executor.vocabulary_size]


async def test_the_same_calls_do_the_same(executor: AsyncExecutor, tmp_path: Path) -> None:
    with Executor("toy.gguf", **_SMALL) as plain:  # type: ignore[arg-type]
        expected = await _does(plain, tmp_path / "plain")
    got = await _does(executor, tmp_path / "awaited")
    assert got == expected
    assert len(got) > 30
    assert filecmp.cmp(tmp_path / "plain", tmp_path / "awaited", shallow=False)


async def test_conversations_that_are_the_same_are_equal(executor: AsyncExecutor) -> None:
    first, second = await executor.create(), await executor.create()
    await first.prompt("a")
    assert (await executor.infer()).done == (first,)
    assert set(await executor.conversations()) == {first, second}
    assert first != second


async def test_conversations_that_generate_together_share_steps(executor: AsyncExecutor) -> None:
    """Each round has what one next() of each does, as on the executor's thread."""
    conversations = [await executor.create() for _ in range(3)]
    for number, conversation in enumerate(conversations):
        await conversation.prompt([number])
    params = SamplingParams(temperature=0, logit_bias={257: -100.0})

    def counted(plain: Executor) -> int:
        moves = [one.generation(10, params, None) for one in plain.conversations]
        with patch.object(plain.backend, "decode", wraps=plain.backend.decode) as decode:
            for _round in zip(*moves, strict=True):
                pass
        return decode.call_count

    assert await executor._run(counted) == 11
    texts = [conversation.tokens[1:] for conversation in conversations]
    for number, conversation in enumerate(conversations):
        await conversation.modify(lambda _, number=number: [number])  # type: ignore[misc]

    async def written(conversation: AsyncConversation) -> list[int]:
        return [token.id async for token in conversation.generate(10, params)]

    assert list(await asyncio.gather(*map(written, conversations))) == texts


async def test_a_cancelled_call_that_waits_never_starts(executor: AsyncExecutor, gate: Gate) -> None:
    conversation = await _ready(executor)
    running = asyncio.create_task(conversation.sample(gate))
    await gate.until_started()
    waiting = asyncio.create_task(conversation.prompt("never"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not running.done()
    gate.released.set()
    assert (await running).id == 7
    assert await conversation.text() == "ready"


async def test_a_cancelled_call_that_runs_is_waited_for(executor: AsyncExecutor, gate: Gate) -> None:
    conversation = await _ready(executor)

    def slowly(tokens: list[int]) -> list[int]:
        return [*tokens, gate(np.empty(0, np.float32))]

    call = asyncio.create_task(conversation.modify(slowly))
    await gate.until_started()
    for _ in range(3):
        call.cancel()
        await asyncio.sleep(0.01)
        assert not call.done()
    gate.released.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (conversation.state, conversation.tokens[-1]) == (State.PENDING, 7)
    assert (await executor.infer()).done == (conversation,)


async def test_a_cancelled_call_leaves_no_conversation(executor: AsyncExecutor, gate: Gate) -> None:
    root = await _ready(executor)

    def slow_fork(conversation: Conversation) -> Conversation:
        gate(np.empty(0, np.float32))
        return conversation.fork()

    call = asyncio.create_task(root._run(slow_fork))
    await gate.until_started()
    call.cancel()
    gate.released.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await executor.conversations() == (root,)


async def test_a_cancelled_stream_has_appended_what_it_yielded(executor: AsyncExecutor, gate: Gate) -> None:
    conversation = await _ready(executor)
    yielded = list[int]()

    def sampler(logits: NDArray[np.float32]) -> int:
        return gate(logits) if len(yielded) == 3 else 5

    async def stream() -> None:
        async for token in conversation.generate(20, sampler):
            yielded.append(token.id)

    call = asyncio.create_task(stream())
    await gate.until_started()
    call.cancel()
    gate.released.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (yielded, conversation.state) == ([5, 5, 5], State.READY)
    assert conversation.tokens[-4:] == [ord("y"), 5, 5, 5]
    assert [token.id async for token in conversation.generate(2, lambda _logits: 6)] == [6, 6]


async def test_closing_waits_for_the_call_that_runs(gate: Gate) -> None:
    executor = _executor()
    async with executor:
        conversation = await _ready(executor)
        running = asyncio.create_task(conversation.sample(gate))
        await gate.until_started()
        closing = [asyncio.create_task(executor.close()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(caravan.ClosedError):
            await conversation.text()
        gate.released.set()
        assert (await running).id == 7
        await asyncio.gather(*closing)
        await executor.close()
        await conversation.close()
        assert conversation.state is State.ENDED
    calls: list[Callable[[], Any]] = [executor.create, executor.infer, conversation.sample, conversation.fork]
    for call in calls:
        with pytest.raises(caravan.ClosedError):
            await call()
    with pytest.raises(caravan.ClosedError):
        async with executor:
            pass


async def test_an_executor_is_opened_first() -> None:
    executor = _executor()
    with pytest.raises(caravan.ClosedError, match="not open"):
        await executor.create()
    await executor.close()


async def test_what_cannot_be_opened_leaves_nothing() -> None:
    for executor, error in (
        (AsyncExecutor("nowhere.gguf"), caravan.ModelError),
        (_executor(speculate=4), TypeError),
        (AsyncExecutor.open("nowhere.bin"), FileNotFoundError),
    ):
        with pytest.raises(error):
            async with executor:
                pass
    assert _threads() == []


async def test_opening_that_is_cancelled_leaves_nothing(gate: Gate) -> None:
    opened = list[Executor]()

    def slowly() -> Executor:
        gate(np.empty(0, np.float32))
        opened.append(Executor("toy.gguf", **_SMALL))  # type: ignore[arg-type]
        return opened[0]

    executor = _executor()
    executor._make = slowly
    opening = asyncio.create_task(executor.__aenter__())
    await gate.until_started()
    opening.cancel()
    gate.released.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    with pytest.raises(caravan.ClosedError):
        opened[0].infer()
    assert _threads() == []


async def test_two_event_loops_share_an_executor(executor: AsyncExecutor) -> None:
    params = SamplingParams(temperature=0, logit_bias={257: -100.0})

    async def written(prompt: str) -> list[int]:
        async with await executor.create() as conversation:
            await conversation.prompt(prompt)
            return [token.id async for token in conversation.generate(10, params)]

    texts: dict[str, list[int]] = {}

    def beside(prompt: str) -> None:
        texts[prompt] = asyncio.run(written(prompt))

    threads = [threading.Thread(target=beside, args=(prompt,)) for prompt in ("one", "two")]
    for thread in threads:
        thread.start()
    texts["here"] = await written("here")
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert texts == {prompt: await written(prompt) for prompt in ("one", "two", "here")}
    assert await executor.conversations() == ()
