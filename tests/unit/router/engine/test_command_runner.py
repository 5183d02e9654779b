"""The commands of a session with a shard, and how long the shard may take for them."""

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
from caravan_testing.media_prompts import spelled_picture

NOW = 1000.0


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


def pace(*steps: tuple[int, float]) -> StepPace:
    made = StepPace(1.25, 60.0)
    for tokens, seconds in steps:
        made.note(tokens, seconds, NOW)
    return made


def test_the_first_steps_may_take_as_long_as_any() -> None:
    assert pace(*[(1, 0.01)] * 15).limit_s(1, NOW) == 60.0


def test_a_hung_decode_is_noticed_soon() -> None:
    assert pace(*[(8, 0.02)] * 20).limit_s(8, NOW) == 1.25


def test_steps_of_a_slow_shard_may_take_longer() -> None:
    assert pace(*[(8, 1.0)] * 20).limit_s(8, NOW) == 4.0


def test_a_chunk_of_a_long_prompt_may_take_as_much_longer_as_it_has_tokens() -> None:
    """512 tokens at 20 ms each take 10 s."""
    assert pace(*[(1, 0.02)] * 20).limit_s(512, NOW) > 4 * 10.0
    assert pace(*[(1, 0.2)] * 20).limit_s(512, NOW) == 60.0


def test_one_slow_step_counts_until_enough_steps_have_followed() -> None:
    shard = pace(*[(8, 0.02)] * 20, (512, 3.0))
    assert shard.limit_s(8, NOW) == 12.0
    for _ in range(64):
        shard.note(8, 0.02, NOW)
    assert shard.limit_s(8, NOW) == 1.25


def test_no_step_may_take_longer_than_the_operator_allows() -> None:
    assert pace(*[(8, 50.0)] * 20).limit_s(8, NOW) == 60.0


def test_the_first_step_after_a_long_rest_may_take_as_long_as_any() -> None:
    shard = pace(*[(8, 0.02)] * 20)
    assert shard.limit_s(8, NOW + 20.0) == 1.25
    assert shard.limit_s(8, NOW + 40.0) == 60.0
