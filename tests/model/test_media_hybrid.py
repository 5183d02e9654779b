"""Pictures in a model with recurrent layers and positions in a grid, whose sequences are shared and saved whole."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import StepOutcome
from caravan_shard.protocol.results import StepResult
from caravan_testing.media_kinds import HYBRID, MadeKind, MtmdReference
from caravan_testing.media_prompts import MediaPrompt, run_prompt
from caravan_testing.shard_builders import load_entry, save_entry, state_entry, with_state


@pytest.fixture(params=list(KvLayout), ids=lambda layout: layout.value)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeKind]:
    made = MadeKind(HYBRID, request.param, tmp_path_factory.mktemp("hybrid"), cells=2048)
    yield made
    made.close()


def _expected(made: MadeKind, seed: int) -> list[int]:
    reference = MtmdReference(made.model, made.projector)
    output = reference.output(*made.parts(seed), count=16)
    reference.close()
    return output


@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_those_of_llama_cpp(made: MadeKind, seed: int) -> None:
    prompt, expected = made.prompt(seed), _expected(made, seed)
    assert run_prompt(made.driver, prompt) == expected
    assert made.driver.backend.length(0) == len(prompt) + 15
    made.driver.engine.release_all()
    first, second = prompt.media
    assert run_prompt(made.driver, prompt, cuts=[first.offset, first.end, second.offset - 2, second.end]) == expected


def test_cells_and_states_are_saved_loaded_and_shared(made: MadeKind) -> None:
    prompt, expected = made.prompt(0), _expected(made, 0)
    border, end = prompt.media[0].end, prompt.media[1].end
    begun = next(iter(prompt.chunks(0, cuts=[end], max_new=16, ignore_eos=True)))
    made.driver.prefill(begun)
    tokens = prompt.token_ids[:end]
    entries = (save_entry(0, tokens[:border]), save_entry(0, tokens, border), state_entry(0, tokens, release=True))
    assert made.driver.save(*entries) == [True] * 3
    entry = with_state(load_entry(1, tokens, (tokens[:border], border), (tokens, end)), tokens)
    assert made.driver.load(replace(entry, media=prompt.media)) == [True]
    for _ in range(2):
        assert run_prompt(made.driver, prompt, 2, copy=PrefixCopy(1, end)) == expected
        made.driver.keep(1)


def test_a_step_without_room_leaves_its_sequence_as_it_was(made: MadeKind) -> None:
    """Its first pass would have had room."""
    prompt, expected = made.prompt(0), _expected(made, 0)
    first, second = prompt.media
    chunks = list(prompt.chunks(0, cuts=[first.end], max_new=16, ignore_eos=True))
    made.driver.prefill(chunks[0])
    limits = made.driver.backend.capacity.current
    if limits.layout is KvLayout.UNIFIED:
        room = second.end - first.end
        text = MediaPrompt([1] + [60] * (limits.cells - first.end - room - 2))
        made.driver.prefill(text.first_chunk(1, max_new=1))
        result = made.driver.try_prefill(chunks[1])
        assert isinstance(result, StepResult)
        assert result.outcome is StepOutcome.NO_KV
        made.driver.keep(0)
    made.driver.prefill(chunks[1])
    made.driver.decode([0])
    assert made.driver.output[0] == expected
