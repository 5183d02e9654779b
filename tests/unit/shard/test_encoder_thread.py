"""Media are encoded one after another, on a thread that is gone when nothing is left to encode."""

import asyncio
import threading

import pytest

from caravan_shard.backends.base import ModelUsers
from caravan_shard.engine.worker import ENDING
from caravan_shard.service.media import EncoderThread
from caravan_shard.service.model_calls import ModelCalls
from caravan_testing.waiting import DEADLINE_S, eventually


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
