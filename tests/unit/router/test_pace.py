"""How long a step may take before its shard counts as hung."""

from caravan_router.engine.command_runner import StepPace

NOW = 1000.0


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
