"""What a router makes of the replies of a shard."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from caravan_proto.errors import ShardError
from caravan_router.engine.command_runner import CommandRunner, Session, StepPace
from caravan_router.engine.shard_calls import ShardRpcError
from caravan_scheduler.actions import Encode
from caravan_scheduler.core.media import Picture
from caravan_scheduler.events import Encoded, EncodeOutcome
from caravan_testing.toy_media import spelled_picture


async def outcomes(answers: Sequence[Exception | float]) -> list[EncodeOutcome]:
    """Return what the scheduler hears of encodings that a shard answers so."""
    left, ended, all_ended = list(answers), list[EncodeOutcome](), asyncio.Event()

    async def encode_media(_media: Any) -> Any:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(seconds=answer)

    def post(event: Any) -> None:
        assert isinstance(event, Encoded)
        ended.append(event.outcome)
        if len(ended) == len(answers):
            all_ended.set()

    observer = SimpleNamespace(encoded=lambda *_args, **_named: None)
    client: Any = SimpleNamespace(encode_media=encode_media)
    sink: Any = SimpleNamespace(observer=observer, post=post)
    session = Session(address="a", client=client, epoch=1, sink=sink, hostname="")
    runner = CommandRunner(session, StepPace(1.0, 60.0))
    picture = Picture.of(*spelled_picture("a cat"))
    for number in range(len(answers)):
        runner.encode(Encode(encode_id=number, shard="a", media=picture))
    task = asyncio.create_task(runner.run_encodings())
    await all_ended.wait()
    task.cancel()
    return ended


@pytest.mark.parametrize("error", [None, *ShardError])
async def test_a_medium_is_refused_for_good_unless_the_call_or_the_shard_ended(error: ShardError | None) -> None:
    """Otherwise a shard that drains would fail requests which others can serve."""
    passes = error in (None, ShardError.DRAINING)
    expected = EncodeOutcome.FAILED if passes else EncodeOutcome.REFUSED
    assert await outcomes([ShardRpcError(error, "no"), 0.1]) == [expected, EncodeOutcome.DONE]
