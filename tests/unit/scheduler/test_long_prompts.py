"""Short prompts do not wait for the whole of a long one, which they hardly delay, and nobody starves."""

from itertools import pairwise

import pytest

from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.events import Submitted
from caravan_testing.play import Play
from caravan_testing.requests import prompt_of, request

# Alone: 3,000 tokens take 30 s and 31 steps of a second.
_LONG = prompt_of(3000)
_CONFIG = SchedulerConfig()


def play(tokens: int = len(_LONG)) -> Play:
    """Return a play whose shard knows what prompts cost, and has computed 2 s of a long one, request 1."""
    made = Play()
    made.ask(100, prompt_of(200, seed=50))
    made.until_idle()
    made.ask(1, _LONG[:tokens])
    made.pass_s(2.0)
    return made


def ttft(made: Play, request_id: int) -> float:
    return made.tokens_s[request_id][0] - made.asked_s[request_id]


def alone_s() -> float:
    made = play()
    made.until_idle()
    return ttft(made, 1)


@pytest.mark.parametrize("tokens", [2, 40])
def test_a_short_prompt_waits_for_the_step_under_way_and_its_own(tokens: int) -> None:
    made = play()
    made.ask(2, prompt_of(tokens, seed=2))
    made.until_idle()
    assert ttft(made, 2) <= 2.1 * _CONFIG.idle_step_s
    assert ttft(made, 1) <= 1.1 * alone_s()
    gaps = [later - earlier for earlier, later in pairwise(made.tokens_s[2])]
    assert max(gaps) <= 1.05 * _CONFIG.target_itl_s


def test_several_short_prompts_start_together() -> None:
    made = play()
    for number in range(2, 6):
        made.ask(number, prompt_of(10, seed=number))
    made.until_idle()
    assert max(ttft(made, number) for number in range(2, 6)) <= 2.1 * _CONFIG.idle_step_s


def test_a_long_prompt_keeps_half_of_the_steps_whatever_comes() -> None:
    made = play()
    for number in range(2, 80):
        made.ask(number, prompt_of(60, seed=number), output=1)
        made.pass_s(0.5)
    made.until_idle()
    assert ttft(made, 1) <= 2.2 * alone_s()


def test_prompts_of_about_the_same_length_are_computed_in_order() -> None:
    made = play()
    made.ask(2, prompt_of(1600, seed=2), output=1)
    made.until_idle()
    assert made.started_s[2] >= made.tokens_s[1][0] - 2 * _CONFIG.idle_step_s


def test_a_prompt_that_was_passed_often_enough_starts_beside_the_long_one() -> None:
    made = play(1900)
    made.ask(2, prompt_of(1200, seed=2), output=1)
    short = range(3, 3 + _CONFIG.max_bypass + 8)
    for number in short:
        made.ask(number, prompt_of(4, seed=number), output=1)
        made.pass_s(0.3)
    made.until_idle()
    assert sum(made.started_s[number] < made.started_s[2] for number in short) >= _CONFIG.max_bypass
    assert made.started_s[2] < made.tokens_s[1][0]
    assert max(ttft(made, number) for number in short) <= 3 * _CONFIG.idle_step_s


def test_a_higher_priority_waits_for_no_long_prompt_and_a_lower_one_does() -> None:
    made = play()
    made.ask(2, prompt_of(300, seed=2), output=1, priority=1)
    made.ask(3, prompt_of(2, seed=3), output=1, priority=-1)
    made.until_idle()
    assert ttft(made, 2) <= 5.0
    assert ttft(made, 3) >= ttft(made, 1) / 2


def test_a_short_prompt_of_another_key_shares_even_the_end_of_a_long_one() -> None:
    made = play()
    made.pass_s(26.5)
    left = made.shard.stays.prefilling[0]
    assert 0 < left.target - left.computed < 300
    made.ask(2, prompt_of(2, seed=2), tenant=Tenant(name="other"))
    made.until_idle()
    assert made.tokens_s[2][0] <= made.tokens_s[1][0]


def test_a_long_prompt_that_waited_long_shares_its_steps_like_any_other() -> None:
    made = Play()
    made.ask(100, prompt_of(200, seed=50))
    made.until_idle()
    came_s = made.fleet.now_s - 2.5 * _CONFIG.aging_s
    made.fleet.handle([Submitted(request(1, _LONG, 10, ignore_eos=True, arrived_s=came_s))])
    made.pass_s(2.0)
    made.ask(2, prompt_of(40, seed=2), tenant=Tenant(name="other"))
    made.until_idle()
    assert ttft(made, 2) <= 2.1 * _CONFIG.idle_step_s
