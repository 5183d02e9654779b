"""Prompts of models with recurrent layers pause where others will continue, and their state is saved there."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from caravan_proto.messages.commands import Prefill, Save
from caravan_proto.messages.limits import Saving
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.shard.checkpoints import thinned
from caravan_testing.ledgers import limits_of
from caravan_testing.simulation import Simulation

END = 9
RECURRENT: dict[str, Any] = {"whole_only": True, "saving": Saving.WITH_STATE, "memory_bytes": 1 << 20}


ENDS = st.lists(st.integers(1, 400), min_size=1, max_size=60).map(
    lambda steps: [sum(steps[:n]) for n in range(1, 1 + len(steps))]
)


def recurrent(**fields: Any) -> ShardLimits:
    return replace(
        limits_of(**{"cells": 4000, "cells_per_sequence": 4000, **RECURRENT, **fields}), end_tokens=frozenset({END})
    )


def begun(**fields: Any) -> Simulation:
    simulation = Simulation(SchedulerConfig())
    simulation.join("a", recurrent(**fields))
    return simulation


def message(token: int, length: int) -> tuple[int, ...]:
    return (*[token] * (length - 1), END)


def computed(simulation: Simulation) -> int:
    """Return how many tokens of prompts were computed."""
    prefills = simulation.sent(Prefill)
    return sum(len(chunk.token_ids) for prefill in prefills for chunk in prefill.chunks)


def saved_ends(simulation: Simulation) -> list[int]:
    """Return the lengths of the prefixes that were saved while their sequence went on."""
    saves = simulation.sent(Save)
    return [entry.end for save in saves for entry in save.entries if entry.is_state and not entry.release]


def answer(simulation: Simulation, prompt: tuple[int, ...], new: int = 4) -> int:
    """Return how many tokens of ``prompt`` were computed for its answer."""
    before = computed(simulation)
    simulation.complete(prompt, new, ignore_eos=True)
    return computed(simulation) - before


def test_a_prompt_pauses_at_the_ends_of_its_messages_and_before_its_last_two_tokens() -> None:
    simulation = begun()
    answer(simulation, message(1, 40) + message(2, 30) + (3,) * 50)
    assert saved_ends(simulation) == [40, 70, 118]


def test_of_places_close_together_the_end_of_the_first_message_stays_then_that_of_the_last() -> None:
    simulation = begun()
    answer(simulation, message(1, 40) + message(2, 10) + message(3, 30) + message(4, 10) + (5,) * 10)
    assert saved_ends(simulation) == [40, 90]


def test_short_prompts_do_not_pause() -> None:
    simulation = begun()
    answer(simulation, message(1, 8) + (2,) * 9)
    assert saved_ends(simulation) == []


def test_other_models_do_not_pause() -> None:
    for limits in ({"whole_only": False, "saving": Saving.ANY}, {"memory_bytes": 0}, {"saving": Saving.NOTHING}):
        simulation = begun(**limits)
        answer(simulation, message(1, 40) + message(2, 30) + (3,) * 50)
        assert saved_ends(simulation) == []


def test_a_turn_continues_from_the_end_of_the_last_message_where_the_template_has_changed_the_answer() -> None:
    simulation = begun()
    system, question = message(1, 100), message(2, 60)
    assert answer(simulation, (*system, *question, 3, 4), new=20) == 162
    # The thoughts are left out.
    second = (*system, *question, 3, *message(5, 30), *message(6, 40), 3, 4)
    assert answer(simulation, second, new=20) == len(second) - 160
    # Rewound, with another question.
    assert answer(simulation, (*system, *question, 3, *message(5, 30), *message(7, 50), 3, 4)) == 52
    # Another conversation with the same first message.
    assert answer(simulation, (*system, *message(8, 60), 3, 4)) == 62


def test_an_equal_prompt_computes_its_last_two_tokens() -> None:
    simulation = begun()
    prompt = (1,) * 100
    assert answer(simulation, prompt) == 100
    assert answer(simulation, prompt) == 2


def test_the_third_prompt_continues_where_the_second_left_the_first() -> None:
    simulation = begun()
    document = tuple(range(10, 110))
    assert answer(simulation, document + (1,) * 30) == 130
    assert answer(simulation, document + (2,) * 30) == 130
    assert answer(simulation, document + (3,) * 30) == 130 - 96
    assert answer(simulation, document[:50] + (4,) * 30) == 80


def test_equal_prompts_and_those_that_begin_alike_wait_for_the_first() -> None:
    simulation = begun()
    for last in ((2,) * 40, (2,) * 40, (2,) * 40, (3,) * 40):
        simulation.submit(message(1, 200) + last, 4, ignore_eos=True)
    simulation.run()
    assert computed(simulation) == 240 + 2 * 2 + 40
    assert len(simulation.finished) == 4


def test_those_that_are_loaded_beside_a_running_prompt_share_its_cells() -> None:
    simulation = begun()
    prompt = message(1, 200) + (2,) * 40
    for _ in range(4):
        simulation.submit(prompt, 50, ignore_eos=True)
    shard = simulation.shards["a"]
    while len(shard.held) < 4 or any(held.pending is False for held in shard.held.values()):
        simulation.advance("a")
    assert computed(simulation) == 240 + 3 * 2
    # Each has loaded a cell of its own, computed the last two tokens, and generated some.
    assert shard.used_cells <= 240 + 3 * (1 + 2) + 4 * 50
    simulation.settle()


def test_a_prompt_goes_on_although_its_state_was_not_saved() -> None:
    simulation = begun()
    simulation.shards["a"].refuse_next_save = True
    assert answer(simulation, message(1, 40) + (2,) * 30) == 70
    assert answer(simulation, message(1, 40) + (3,) * 30) == 70


def conversation(turns: int) -> tuple[int, ...]:
    """Return the prompt of a turn; the model's own answers are not in it."""
    prompt = message(1, 100)
    for turn in range(turns):
        prompt += (*message(10 + 2 * turn, 40), 3, 4, *message(11 + 2 * turn, 30))
    return prompt[:-30]


def test_a_client_goes_back_to_any_turn_of_a_conversation() -> None:
    simulation = begun()
    for turn in range(1, 11):
        answer(simulation, conversation(turn), new=20)
    for turn in (5, 9, 2, 10):
        assert answer(simulation, conversation(turn)) == 2


def test_where_memory_is_scarce_going_back_costs_more() -> None:
    simulation = begun(memory_bytes=1000)
    for turn in range(1, 11):
        answer(simulation, conversation(turn), new=20)
    back = conversation(5)
    assert 2 < answer(simulation, back) <= len(conversation(10)) - len(back) + 2


def test_cells_are_saved_once() -> None:
    simulation = begun()
    for turn in range(1, 11):
        answer(simulation, conversation(turn), new=20)
    saved = [entry for save in simulation.actions if isinstance(save, Save) for entry in save.entries]
    cells = sum(entry.end - entry.start for entry in saved)
    # Each answer, which is not in the next prompt, and each end of a prompt.
    assert len(conversation(10)) < cells <= len(conversation(10)) + 10 * (20 + 2)


@given(ends=ENDS, forks=st.sets(st.integers(0, 59)), most=st.sampled_from([0, 0, 10]))
def test_checkpoints_are_few_and_going_back_is_cheap(ends: list[int], forks: set[int], most: int) -> None:
    kept = {end for place, end in enumerate(ends) if place in forks}
    held: list[int] = []
    for end in ends:
        held.append(end)
        gone = thinned(held, kept, most)
        assert not kept & set(gone)
        assert len(held) - len(gone) >= min(len(held), most)
        held = [one for one in held if one not in gone]
        # The first and the last few stay.
        assert held[0] == ends[0]
        assert held[-4:] == ends[: ends.index(end) + 1][-4:]
        others = len(held) - len(kept & set(held))
        assert others <= max(most, 4 + 2 * (2 + len(kept & set(held))) + 2 * end.bit_length())
    longest = max(after - before for before, after in zip([0, *ends], ends, strict=False))
    for target in range(ends[0], ends[-1], 7):
        nearest = max(end for end in held if end <= target)
        assert target - nearest <= max(longest, ends[-1] - target)
