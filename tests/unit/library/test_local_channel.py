"""Calls over a channel to a servicer in the same process keep what the router's client expects of gRPC."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from caravan.local_channel import LocalChannel


class _Servicer:
    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []

    async def Echo(self, request: Any, context: Any) -> Any:
        self.begun.append(request)
        context.add_done_callback(lambda _: self.ended.append(request))
        if request == "refused":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")
        if request == "never":
            await asyncio.get_running_loop().create_future()
        return request

    async def Count(self, request: int, context: Any) -> AsyncIterator[int]:
        context.add_done_callback(lambda _: self.ended.append(request))
        await context.send_initial_metadata(())
        for number in range(request):
            yield number
        if request == 3:
            await context.abort(grpc.StatusCode.ABORTED, "three is too many")


@pytest.fixture
def servicer() -> _Servicer:
    return _Servicer()


@pytest.fixture
def channel(servicer: _Servicer) -> LocalChannel:
    return LocalChannel(servicer)


async def test_calls_start_in_the_order_in_which_they_are_made(channel: LocalChannel, servicer: _Servicer) -> None:
    echo = channel.unary_unary("/service/Echo")
    calls = [echo(number) for number in range(5)]
    assert await calls[4] == 4
    assert servicer.begun == list(range(5))
    assert await asyncio.gather(*calls[:4]) == list(range(4))
    assert servicer.ended == list(range(5))


async def test_a_refused_call_raises_its_status(channel: LocalChannel, servicer: _Servicer) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await channel.unary_unary("/service/Echo")("refused")
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "not now")
    assert servicer.ended == ["refused"]


async def test_a_stream_has_its_replies_and_an_end(channel: LocalChannel) -> None:
    call = channel.unary_stream("/service/Count")(2)
    await call.initial_metadata()
    assert [await call.read() for _ in range(4)] == [0, 1, grpc.aio.EOF, grpc.aio.EOF]


async def test_a_stream_that_is_refused_raises_after_its_replies(channel: LocalChannel, servicer: _Servicer) -> None:
    call = channel.unary_stream("/service/Count")(3)
    assert [await call.read() for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError, match="three is too many"):
            await call.read()
    assert servicer.ended == [3]


async def test_closing_cancels_what_runs(channel: LocalChannel, servicer: _Servicer) -> None:
    call = channel.unary_unary("/service/Echo")("never")
    await asyncio.sleep(0)
    await channel.close()
    assert call.cancelled()
    assert servicer.ended == ["never"]
