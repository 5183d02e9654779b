"""Jobs that come back, late or never, beside requests that wait for their cells."""

from hypothesis import given, settings
from hypothesis import strategies as st

from caravan_scheduler import invariants
from caravan_scheduler.events import ToolsCalled
from caravan_studio.replay.played_shard import OUTPUT_TOKEN_ID
from caravan_testing.play import Play
from caravan_testing.requests import prompt_of

_OUTPUT = 10
# Delays before the next requests of a job, which then never comes back, and whether its answers call tools.
JOBS = st.lists(
    st.tuples(st.lists(st.sampled_from([0.1, 0.6, 1.5, 3.0, 9.0, 30.0]), max_size=4), st.booleans()),
    min_size=1,
    max_size=4,
)
# For how long clients ask to keep their prompts.
KEEP_S = st.sampled_from([0.0, 0.0, 20.0, 1e5])
# The most that run on the shard and are counted as delayed by computing again.
_MOST_DELAYED = 8
# The router looks at what is held so often, in seconds.
_TICK_S = 0.25


@settings(max_examples=25)
@given(jobs=JOBS, others=st.lists(st.integers(500, 3500), min_size=1, max_size=4), named=st.booleans(), keep_s=KEEP_S)
def test_nothing_starves_and_a_wrong_prediction_costs_a_recomputation_at_most(
    jobs: list[tuple[list[float], bool]], others: list[int], named: bool, keep_s: float
) -> None:
    play = Play()
    prompts = {key: prompt_of(1000, seed=key + 1) for key in range(len(jobs))}
    # When the next request of a job comes; the ids of its requests.
    due = dict.fromkeys(prompts, 0.0)
    left = {key: list(delays) for key, (delays, _) in enumerate(jobs)}
    running: dict[int, int] = {}
    next_id = 1
    for number, tokens in enumerate(others):
        play.ask(next_id, prompt_of(tokens, seed=30 + number), output=_OUTPUT, keep_s=keep_s)
        next_id += 1
    most_s = 0.0
    for _ in range(4 * 600):
        for key in [key for key, at_s in due.items() if at_s <= play.fleet.now_s]:
            del due[key]
            running[next_id] = key
            play.ask(next_id, prompts[key], output=_OUTPUT, session=f"job-{key}" if named else "", keep_s=keep_s)
            next_id += 1
        play.pass_s(_TICK_S)
        invariants.check(play.scheduler)
        for request_id in [one for one in running if one not in play.scheduler.sequences]:
            key = running.pop(request_id)
            prompts[key] = (*prompts[key], *(OUTPUT_TOKEN_ID,) * _OUTPUT, *prompt_of(50, seed=20))
            if jobs[key][1]:
                play.fleet.handle([ToolsCalled(request_id)])
            if left[key]:
                due[key] = play.fleet.now_s + left[key].pop(0)
        for parked in play.shard.stays.parked.values():
            most_s = _MOST_DELAYED * play.shard.costs.recompute_s(0, len(parked.sequence.spec.prompt) + _OUTPUT)
            assert keep_s or parked.hold.held_s <= most_s + _TICK_S
        if not (due or running or play.scheduler.sequences):
            break
    assert not play.scheduler.sequences, "a request has waited for ten minutes"
    assert len(play.started_s) == next_id - 1
