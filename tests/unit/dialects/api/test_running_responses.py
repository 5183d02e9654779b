"""Who may extend a conversation, and who waits for it."""

import asyncio
from contextlib import ExitStack

import pytest

from caravan_dialects.api.errors import ConversationBusyError
from caravan_dialects.api.openai.responses.running import RunningResponses
from caravan_testing.waiting import eventually


async def test_those_who_wait_for_a_conversation_get_it_one_after_the_other() -> None:
    running, order = RunningResponses(), list[int]()

    async def extend(number: int, held: ExitStack) -> None:
        held.enter_context(await running.extending_next("key", "conv"))
        order.append(number)

    first, second, third = ExitStack(), ExitStack(), ExitStack()
    await extend(1, first)
    waiting = [asyncio.create_task(extend(2, second)), asyncio.create_task(extend(3, third))]
    await eventually(lambda: len(running._busy["key", "conv"]) == 2, "both wait")
    with running.extending("key", "other"), running.extending("other", "conv"):
        assert order == [1]
    first.close()
    with pytest.raises(ConversationBusyError), running.extending("key", "conv"):
        pass
    await waiting[0]
    assert order == [1, 2]
    second.close()
    await waiting[1]
    third.close()
    assert (order, running.is_busy) == ([1, 2, 3], False)


@pytest.mark.parametrize("is_free", [False, True])
async def test_who_waits_for_a_conversation_may_leave_also_when_it_becomes_free(is_free: bool) -> None:
    running = RunningResponses()
    held = ExitStack()
    held.enter_context(running.extending("key", "conv"))
    waiting = asyncio.create_task(running.extending_next("key", "conv"))
    await eventually(lambda: running._busy["key", "conv"], "it waits")
    if is_free:
        held.close()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held.close()
    assert not running.is_busy
