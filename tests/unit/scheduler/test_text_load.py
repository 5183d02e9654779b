"""The shards that a model needs which only embeds: what comes, what a token takes, and what waits."""

import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.planning.wanted_shards import WantedShards
from caravan_scheduler.text_load import TextLoad
from caravan_testing.ledgers import limits_of
from caravan_testing.requests import prompt_of
from caravan_testing.simulation import simulation

CONFIG = SchedulerConfig()
ONLY_EMBEDS = limits_of(cells=0, cells_per_sequence=0, max_sequences=0)


def played(load: TextLoad, *, shards: int, rate: float, token_s: float, until_s: float) -> list[float]:
    """Let calls of 50 to 500 tokens come to ``shards``, each of which computes one at a time.

    Return how long each waited, in the order of arrival.
    """
    source = random.Random(1)
    # When each shard is free, and the ends of calls under way, with the shard and the tokens.
    free = [(0.0, shard) for shard in range(shards)]
    ends: list[tuple[float, int, int]] = []
    waits, now = [], 0.0
    while (now := now + source.expovariate(rate)) < until_s:
        tokens = source.randint(50, 500)
        free_s, shard = heapq.heappop(free)
        begin_s = max(now, free_s)
        while ends and ends[0][0] <= begin_s:
            end_s, ended, computed = heapq.heappop(ends)
            load.end(ended, computed, end_s)
        load.note_call(tokens, now)
        load.begin(shard, begin_s)
        heapq.heappush(ends, (begin_s + tokens * token_s, shard, tokens))
        heapq.heappush(free, (begin_s + tokens * token_s, shard))
        waits.append(begin_s - now)
    while ends:
        end_s, ended, computed = heapq.heappop(ends)
        load.end(ended, computed, end_s)
    return waits


@pytest.mark.parametrize(("rate", "token_s"), [(5.0, 0.0005), (20.0, 0.001), (60.0, 0.001), (40.0, 0.004)])
def test_the_shards_that_it_needs_keep_waits_short_and_are_not_idle(rate: float, token_s: float) -> None:
    load = TextLoad()
    busy = rate * 275 * token_s
    played(load, shards=math.ceil(1.5 * busy), rate=rate, token_s=token_s, until_s=200.0)
    needed = load.needed(CONFIG, 200.0)
    assert 0.8 * busy <= needed <= 1.6 * busy + 1
    waits = sorted(played(TextLoad(), shards=math.ceil(needed), rate=rate, token_s=token_s, until_s=200.0))
    assert waits[int(0.99 * len(waits))] <= CONFIG.target_ttft_s


def test_the_number_hardly_depends_on_how_many_shards_there_are() -> None:
    numbers = []
    for shards in (10, 14, 28):
        load = TextLoad()
        played(load, shards=shards, rate=30.0, token_s=0.001, until_s=200.0)
        numbers.append(load.needed(CONFIG, 200.0))
    assert max(numbers) <= 1.05 * min(numbers)


def known(rate: int, tokens: int, token_s: float) -> TextLoad:
    """Return a load that has seen ``rate`` calls a second for a minute, at equal distances."""
    load = TextLoad()
    for number in range(60 * rate):
        load.note_call(tokens, number / rate)
    load.begin("a", 0.0)
    load.end("a", tokens, tokens * token_s)
    return load


@given(rate=st.integers(1, 40), tokens=st.integers(1, 2000), token_s=st.floats(1e-6, 1e-2))
def test_the_need_is_that_of_littles_law_and_grows_with_all_that_it_takes(
    rate: int, tokens: int, token_s: float
) -> None:
    load = known(rate, tokens, token_s)
    busy = load.arrivals.seen(60.0) * tokens * token_s
    assert busy == pytest.approx(rate * tokens * token_s, rel=0.02)
    needed = load.needed(CONFIG, 60.0)
    assert busy <= needed * 1.000001
    assert needed <= max(8.0, 8.0 * busy)
    slower, more = known(rate, tokens, 2 * token_s), known(rate, 2 * tokens, token_s)
    assert min(slower.needed(CONFIG, 60.0), more.needed(CONFIG, 60.0)) >= 1.5 * needed or needed < 2
    with load.wait_of(30_000):
        assert load.needed(CONFIG, 60.0) == pytest.approx(needed + 1000 * token_s)
    assert load.needed(CONFIG, 60.0) == needed


def test_calls_at_once_on_a_shard_share_its_time_and_failed_ones_tell_nothing() -> None:
    load = TextLoad()
    load.begin("a", 0.0)
    load.begin("a", 0.5)
    load.begin("b", 0.5)
    load.end("a", 100, 1.0)
    load.end("b", 0, 1.5)
    load.end("a", 300, 3.0)
    assert load.token_s == pytest.approx(3.0 / 400)


def test_a_model_that_only_embeds_wants_what_its_texts_need_and_nothing_when_they_have_ended() -> None:
    sim, numbers = simulation(limits=ONLY_EMBEDS), WantedShards()
    state, texts = sim.scheduler.state, numbers.texts
    assert numbers.number(state, 0.0) == 0
    texts.calls = 1
    assert 0 < numbers.number(state, 0.5) < 1
    texts.calls = 0
    assert numbers.number(state, 1.6) == 0
    played(texts, shards=12, rate=30.0, token_s=0.001, until_s=200.0)
    assert numbers.number(state, 200.0) > 30 * 275 * 0.001


def test_texts_of_a_model_that_also_generates_want_none() -> None:
    """They take turns with its steps, which are counted."""
    sim = simulation()
    numbers = WantedShards()
    sim.submit(prompt_of(10), 50)
    sim.advance("a")
    before = numbers.number(sim.scheduler.state, 200.0)
    played(numbers.texts, shards=12, rate=30.0, token_s=0.001, until_s=200.0)
    assert numbers.number(sim.scheduler.state, 201.0) == pytest.approx(before, rel=0.1)
