"""Loops of tool calls: each way sends what it says, and the figures are those of the responses."""

from dataclasses import replace

import pytest
from bench.paths import BenchError
from bench.tool_loops import Got, Way, run_loops, table

from caravan_testing.http_server import serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine, letters

CALL = '{"name": "read_lines", "arguments": {"lines": [123, 456, 789]}}'
TURNS = 3


def calling_engine() -> ScriptedEngine:
    model = replace(CHAT_MODEL, max_sequence_tokens=20_000)
    return ScriptedEngine(model=model, script=lambda _: letters(CALL), cached_tokens=lambda _: 7)


async def test_the_prompts_of_all_ways_are_the_same() -> None:
    prompts = []
    for way in Way:
        engine = calling_engine()
        async with serving(engine) as service:
            loops = await run_loops(way, 2, service.url, seed=1, turns=TURNS)
        prompts.append(sorted(stream.spec.prompt for stream in engine.streams))
        assert [len(loop.turns) for loop in loops] == [TURNS, TURNS]
        assert all(turn.cached_tokens == 7 and turn.ttft_s > 0 for loop in loops for turn in loop.turns)
    assert all(one == prompts[0] for one in prompts)


async def test_only_the_whole_history_grows() -> None:
    sent = {}
    for way in Way:
        async with serving(calling_engine()) as service:
            (loop,) = await run_loops(way, 1, service.url, seed=1, turns=TURNS)
        sent[way] = [turn.sent for turn in loop.turns]
    assert sent[Way.HISTORY][2] - sent[Way.HISTORY][1] > 500
    assert abs(sent[Way.CHAINED][2] - sent[Way.CHAINED][1]) < 100
    lane = len(', "stream_id": "lane-0"')
    assert [one - other for one, other in zip(sent[Way.LANES], sent[Way.SOCKETS], strict=True)] == [lane] * TURNS


@pytest.mark.parametrize("way", [Way.CHAINED, Way.LANES])
async def test_a_refused_request_ends_the_measurement(way: Way) -> None:
    async with serving(ScriptedEngine()) as service:
        with pytest.raises(BenchError, match="no chat template"):
            await run_loops(way, 1, service.url, seed=1, turns=TURNS)


async def test_the_table_has_a_line_for_each_way() -> None:
    async with serving(calling_engine()) as service:
        loops = await run_loops(Way.CHAINED, 2, service.url, seed=1, turns=TURNS)
    _, _, line = table({(2, Way.CHAINED): Got(loops, [0.0015])}).splitlines()
    cells = line.split(" | ")
    assert cells[1] == "HTTP, chained ids"
    assert cells[-2:] == ["21", "1.5 |"]
