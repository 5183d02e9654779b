"""A child process after a fork has neither the threads nor the memory of a model: it is told so, and never waits."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from caravan import LLM, AsyncExecutor, AsyncLLM, Client, Executor, ForkedError, SamplingParams

_GREEDY = SamplingParams(temperature=0, max_tokens=4)


@contextmanager
def _child(work: Callable[[], object]) -> Iterator[int]:
    """Run ``work`` in a child by fork; yield the reading end of a pipe with what it raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
            told = "nothing was raised"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        # Without the ends of this test program.
        os._exit(0)
    os.close(writing)
    try:
        yield reading
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _raised_in_child(work: Callable[[], object]) -> str:
    with _child(work) as reading:
        # Ends with the child; a child that hangs is ended by the limit of the test.
        return os.read(reading, 4096).decode()


def _reason(owner: str) -> str:
    return (
        f"ForkedError: the {owner} was opened by process {os.getpid()}, and a child of fork() cannot use it: its "
        'threads do not exist here. Open it in the child, or start children by multiprocessing.get_context("spawn")'
    )


def test_a_child_of_a_program_with_a_model_is_told_why() -> None:
    with LLM("toy.gguf", backend="fake") as llm:
        session = llm.chat_session()
        assert _raised_in_child(lambda: llm.generate("hi", _GREEDY)) == _reason("model")
        assert _raised_in_child(lambda: next(llm.stream("hi", _GREEDY))) == _reason("model")
        assert _raised_in_child(lambda: session.respond("hi", _GREEDY)) == _reason("model")
        # What the parent has stays the parent's.
        assert _raised_in_child(llm.close) == "nothing was raised"
        assert llm.generate("hi", _GREEDY)[0].finished


def test_a_child_of_a_program_with_an_executor_is_told_why() -> None:
    with Executor("toy.gguf", backend="fake") as executor:
        conversation = executor.create()
        conversation.prompt("a")
        for work in (
            executor.infer,
            executor.create,
            lambda: conversation.fork(),
            lambda: next(conversation.generate(2)),
        ):
            assert _raised_in_child(work) == _reason("executor")
        assert _raised_in_child(executor.close) == "nothing was raised"
        assert executor.infer().done == (conversation,)


def test_a_child_of_a_program_with_a_client_is_told_why() -> None:
    with Client("http://127.0.0.1:1") as client:
        assert _raised_in_child(lambda: client.generate("hi", _GREEDY)) == _reason("client")


async def test_a_child_of_an_asynchronous_program_is_told_why() -> None:
    async with AsyncLLM("toy.gguf", backend="fake") as llm, AsyncExecutor("toy.gguf", backend="fake") as executor:

        def child() -> None:
            # The loop of the parent runs in this thread, as far as asyncio knows.
            asyncio._set_running_loop(None)
            for work in (llm.generate("hi", _GREEDY), executor.create()):
                with pytest.raises(ForkedError):
                    asyncio.run(work)

        assert _raised_in_child(child) == "nothing was raised"


def test_a_child_may_open_a_model_of_its_own() -> None:
    def child() -> None:
        with LLM("toy.gguf", backend="fake") as own:
            assert own.generate("hi", _GREEDY)[0].finished

    with LLM("toy.gguf", backend="fake"):
        assert _raised_in_child(child) == "nothing was raised"
