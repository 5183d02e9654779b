"""A model is freed once nobody uses it; what uses it beside steps ends, and calls that come too late are refused."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from caravan_shard.backends.base import ModelUsers
from caravan_shard.config import ShardConfig
from caravan_shard.engine.worker import ENDING
from caravan_shard.service.contents import ContentsReader
from caravan_shard.service.media import EncoderThread
from caravan_shard.service.model_calls import ModelCalls
from caravan_testing.waiting import DEADLINE_S, eventually


class Work:
    """Work that runs until it is told to end."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.has_ended = False

    def __call__(self) -> str:
        self.began.set()
        assert self.go_on.wait(DEADLINE_S)
        self.has_ended = True
        return "done"


async def test_the_end_waits_for_a_thread_whose_caller_has_gone() -> None:
    users, work = ModelUsers(), Work()
    calls = ModelCalls(users)
    with ThreadPoolExecutor(1) as threads:
        call = asyncio.create_task(calls.run(threads, work))
        assert await asyncio.to_thread(work.began.wait, DEADLINE_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        ending = asyncio.create_task(asyncio.to_thread(users.end))
        calls.refuse()
        assert not work.has_ended
        assert not ending.done()
        work.go_on.set()
        await ending
        assert work.has_ended


async def test_what_has_begun_is_answered_and_all_else_refused() -> None:
    users, work = ModelUsers(), Work()
    calls = ModelCalls(users)
    with ThreadPoolExecutor(1) as threads:
        running = asyncio.create_task(calls.run(threads, work))
        assert await asyncio.to_thread(work.began.wait, DEADLINE_S)
        waiting = asyncio.create_task(calls.run(threads, str, 1))
        await asyncio.sleep(0)
        calls.refuse()
        assert await waiting == ENDING
        assert await calls.run(threads, str, 1) == ENDING
        assert not running.done()
        work.go_on.set()
        assert await running == "done"


async def test_a_thread_that_begins_too_late_does_not_use_the_model() -> None:
    """The worker may free the model between the call's start on the event loop and its start on a thread."""
    users = ModelUsers()
    users.end()
    with users.using() as may_use:
        assert not may_use
    assert await ModelCalls(users).run(ThreadPoolExecutor(1), pytest.fail, "it uses the model") == ENDING


async def test_a_caller_that_goes_while_it_waits_is_cancelled() -> None:
    calls, work = ModelCalls(ModelUsers()), Work()
    with ThreadPoolExecutor(1) as threads:
        running = asyncio.create_task(calls.run(threads, work))
        assert await asyncio.to_thread(work.began.wait, DEADLINE_S)
        waiting = asyncio.create_task(calls.run(threads, str, 1))
        await asyncio.sleep(0)
        # Both at once: the caller has gone, so nobody hears of the refusal.
        waiting.cancel()
        calls.refuse()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        work.go_on.set()
        assert await running == "done"


async def test_a_coroutine_is_cancelled_when_calls_are_refused() -> None:
    calls, never = ModelCalls(ModelUsers()), asyncio.Event()
    cleaned = asyncio.Event()

    async def compile_for_ever() -> str:
        try:
            await never.wait()
        finally:
            cleaned.set()
        return "compiled"

    compiling = asyncio.create_task(calls.unless_ending(compile_for_ever()))
    left = asyncio.create_task(calls.unless_ending(compile_for_ever()))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    calls.refuse()
    assert await compiling == ENDING
    assert cleaned.is_set()
    assert await calls.unless_ending(compile_for_ever()) == ENDING


async def test_errors_of_work_reach_the_caller() -> None:
    calls = ModelCalls(ModelUsers())

    async def fail() -> None:
        raise KeyError("x")

    with ThreadPoolExecutor(1) as threads, pytest.raises(ZeroDivisionError):
        await calls.run(threads, divmod, 1, 0)
    with pytest.raises(KeyError):
        await calls.unless_ending(fail())


async def test_what_is_read_after_the_end_begins_no_task() -> None:
    """The loop may be about to close, and a task that it never starts is a coroutine that is never awaited."""
    unused: Any = Mock()
    reader = ContentsReader(ShardConfig(backend="fake"), unused, unused)
    reader.end()
    reader._begin_telling(unused, None)
    assert reader._telling is None


def _encoder() -> tuple[EncoderThread, ModelCalls]:
    calls = ModelCalls(ModelUsers())
    return EncoderThread(calls), calls


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("media")]


async def test_calls_share_a_thread_that_ends_after_the_last() -> None:
    (encoder, _calls), release = _encoder(), threading.Event()
    waits = asyncio.create_task(encoder.run(release.wait, 30))
    follows = asyncio.create_task(encoder.run(threading.current_thread))
    await asyncio.sleep(0)
    [thread] = _threads()
    assert not follows.done()
    release.set()
    assert await waits
    assert await follows is thread
    await eventually(lambda: not _threads())
    assert await encoder.run(threading.current_thread) is not thread
    encoder.close()


async def test_an_error_ends_the_thread_too() -> None:
    encoder, _calls = _encoder()
    with pytest.raises(ZeroDivisionError):
        await encoder.run(divmod, 1, 0)
    await eventually(lambda: not _threads())


async def test_the_call_that_runs_is_answered_and_the_next_refused_when_the_shard_ends() -> None:
    (encoder, calls), began, release = _encoder(), threading.Event(), threading.Event()

    def call() -> str:
        began.set()
        release.wait(DEADLINE_S)
        return "done"

    running = asyncio.create_task(encoder.run(call))
    waiting = asyncio.create_task(encoder.run(call))
    await asyncio.to_thread(began.wait, 30)
    calls.refuse()
    assert await waiting == ENDING
    assert not running.done()
    encoder.close()
    release.set()
    assert await running == "done"
    await eventually(lambda: not _threads())
