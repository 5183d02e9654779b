"""Jobs: who continues whom, how soon they are expected, and what is kept for them."""

import pytest

from caravan_scheduler.config import Clock, SchedulerConfig
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.events import ToolsCalled
from caravan_scheduler.gaps import REQUEST_GUESS, SESSION_GUESS, Gaps
from caravan_scheduler.jobs.jobs import Jobs
from caravan_scheduler.sequence import Sequence
from caravan_studio.replay.played_shard import OUTPUT_TOKEN_ID
from caravan_testing.play import Play
from caravan_testing.requests import prompt_of, request


def grown(prompt: tuple[int, ...], output: int = 10) -> tuple[int, ...]:
    """Return the prompt of the next turn."""
    return (*prompt, *(OUTPUT_TOKEN_ID,) * output, *prompt_of(100, seed=9))


# What is expected


def test_nothing_is_expected_of_requests_without_a_session_until_some_came_back() -> None:
    gaps = Gaps(REQUEST_GUESS)
    assert gaps.return_rate(0.0) == 0.0
    gaps.note_away(0)
    gaps.note_away(1)
    gaps.note_back(0.8)
    assert gaps.return_rate(0.0) > 0.1


def test_a_session_is_expected_the_sooner_the_sooner_sessions_came_back() -> None:
    soon, late = Gaps(SESSION_GUESS), Gaps(SESSION_GUESS)
    for _ in range(20):
        for place in range(3):
            soon.note_away(place)
        soon.note_back(1.5)
        for place in range(7):
            late.note_away(place)
        late.note_back(25.0)
    assert soon.return_rate(0.0) > 0.4
    assert late.return_rate(0.0) < 0.05
    # One that has been away for much longer than usual is hardly expected.
    assert soon.return_rate(10.0) < soon.return_rate(0.0) / 5


def test_those_that_are_still_away_lower_the_chance() -> None:
    gaps = Gaps(SESSION_GUESS)
    before = gaps.return_rate(0.0)
    for _ in range(30):
        for place in range(8):
            gaps.note_away(place)
    assert gaps.return_rate(0.0) < before / 4


def test_a_job_knows_less_than_its_key_at_first() -> None:
    key = Gaps(SESSION_GUESS)
    for _ in range(50):
        key.note_away(0)
        key.note_back(0.4)
    assert Gaps(key).return_rate(0.0) == pytest.approx(key.return_rate(0.0))


def test_the_requests_of_a_session_are_a_job_and_those_of_another_key_are_not() -> None:
    jobs = Jobs(Clock())
    sequences = [
        Sequence(request(1, prompt_of(50), session="s")),
        Sequence(request(2, prompt_of(60, seed=2), session="s")),
        Sequence(request(3, prompt_of(50), session="s", tenant=Tenant(name="other"))),
        Sequence(request(4, prompt_of(50))),
    ]
    for sequence in sequences:
        jobs.enter(sequence, ())
    first, second, other, nameless = (sequence.job for sequence in sequences)
    assert first is second
    assert len({first, other, nameless}) == 3


def test_a_request_without_a_session_continues_what_it_begins_with() -> None:
    play = Play()
    play.ask(1, prompt_of(300))
    first = play.scheduler.sequences[1]
    play.until_idle()
    play.pass_s(1.0)
    play.ask(2, grown(prompt_of(300)))
    play.ask(3, prompt_of(300)[:200] + prompt_of(200, seed=5))
    assert play.scheduler.sequences[2].job is first.job
    assert play.scheduler.sequences[3].job is not first.job


# What is kept


def busy_play(*, calls_tools: bool = True) -> Play:
    """Return a play in which a session has had three turns, and has 1,600 of 4,000 cells."""
    play = Play()
    prompt = prompt_of(1300)
    for request_id in (1, 2, 3):
        play.ask(request_id, prompt, session="agent")
        play.until_idle()
        if calls_tools:
            play.fleet.handle([ToolsCalled(request_id)])
        if request_id < 3:
            play.pass_s(1.0)
            prompt = grown(prompt)
    return play


def test_cells_are_kept_for_a_job_whose_tools_are_called() -> None:
    play = busy_play()
    play.ask(10, prompt_of(3000, seed=3))
    play.pass_s(1.0)
    assert 10 not in play.started_s
    play.ask(4, grown(grown(grown(prompt_of(1300)))), session="agent")
    assert play.cached[4] > 1500
    play.until_idle()
    assert 10 in play.started_s


def test_a_job_that_does_not_come_back_costs_no_more_than_computing_it_again() -> None:
    play = busy_play()
    began_s = play.fleet.now_s
    play.ask(10, prompt_of(3000, seed=3))
    [kept] = play.shard.stays.parked.values()
    recompute_s = play.shard.costs.recompute_s(0, kept.computed)
    while 10 not in play.started_s:
        play.pass_s(0.25)
    assert play.started_s[10] - began_s <= recompute_s + 0.5


def test_nothing_is_held_against_a_higher_priority() -> None:
    play = busy_play()
    play.ask(10, prompt_of(3000, seed=3), priority=1)
    assert play.started_s[10] == play.fleet.now_s


def test_what_fits_beside_starts_at_once() -> None:
    play = busy_play()
    play.ask(10, prompt_of(1000, seed=3))
    assert play.started_s[10] == play.fleet.now_s


def test_a_short_job_starts_beside_those_that_leave_no_room_for_another_one() -> None:
    play = busy_play()
    play.ask(10, prompt_of(1000, seed=3), session="long")
    play.ask(11, prompt_of(20, seed=4), session="chat")
    play.pass_s(0.25)
    assert 11 in play.started_s
    assert 10 not in play.started_s


def test_others_pass_a_job_against_which_cells_are_held_as_often_as_they_like() -> None:
    play = busy_play()
    play.ask(10, prompt_of(3000, seed=3), session="other")
    short = range(20, 20 + SchedulerConfig().max_bypass + 5)
    for number in short:
        play.ask(number, prompt_of(2, seed=number), output=1, tenant=Tenant(name="chat"))
        play.pass_s(0.05)
    assert 10 not in play.started_s
    assert all(play.started_s[number] - play.asked_s[number] < 0.1 for number in short)
    play.until_idle()
    assert 10 in play.started_s


def test_of_two_jobs_that_do_not_fit_beside_each_other_the_shorter_gives_way() -> None:
    play = Play()
    prompts = {"long": prompt_of(1700, seed=1), "short": prompt_of(1400, seed=2)}
    for number in range(6):
        name = ("long", "short")[number % 2]
        play.ask(number, prompts[name], session=name)
        play.until_idle()
        play.fleet.handle([ToolsCalled(number)])
        prompts[name] = grown(prompts[name])
    long, short = (one.computed for one in play.shard.stays.parked.values())
    play.ask(10, (*prompts["short"], *prompt_of(600, seed=5)), session="short")
    assert 10 not in play.started_s
    play.ask(11, (*prompts["long"], *prompt_of(600, seed=6)), session="long")
    play.pass_s(0.1)
    assert play.cached[11] == long
    [given_way] = play.shard.stays.parked.values()
    assert given_way.computed < short
    play.until_idle()
    assert 10 in play.started_s


def test_for_unrelated_requests_what_was_used_least_recently_makes_way() -> None:
    play = Play()
    for request_id in range(1, 5):
        play.ask(request_id, prompt_of(900, seed=request_id))
        play.until_idle()
    play.ask(9, prompt_of(1500, seed=9))
    assert play.started_s[9] == play.fleet.now_s
    assert [one.request_id for one in play.shard.stays.parked.values()] == [2, 3, 4]
    assert play.shard.stays.parked[1].computed < 900


def test_holding_is_charged_to_the_session() -> None:
    play = busy_play()
    shares = play.scheduler.state.shares
    play.ask(10, prompt_of(3000, seed=3))
    before = shares.charged("", "agent")
    play.pass_s(2.0)
    assert shares.charged("", "agent") > before


def test_sessions_that_do_not_come_back_are_forgotten() -> None:
    clock = Clock()
    jobs = Jobs(clock)
    sequences = [Sequence(request(number, prompt_of(20), session=f"s{number}")) for number in range(3000)]
    for sequence in sequences:
        jobs.enter(sequence, ())
        sequence.output.append(1)
        jobs.answer(sequence)
        jobs.leave(sequence)
    job = sequences[0].job
    assert job is not None
    key = job.key
    assert len(key.sessions) <= 1024
    clock.now_s = 1000.0
    for number in range(2):  # the first looks at the time
        jobs.enter(Sequence(request(4000 + number, prompt_of(20), session="new")), ())
        clock.now_s += 1000.0
    for _ in range(20):
        key.pass_time(clock.now_s)
    assert len(key.sessions) == 1
