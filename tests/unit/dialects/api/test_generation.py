"""What the dialects share: a generation from its submission to its end, its parts, seeds, and prompts with a gap."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.checks import choice_seed
from caravan_dialects.api.generation.context import ServedModel
from caravan_dialects.api.generation.fill import Gap, fill_prompt, trimmed
from caravan_dialects.api.generation.parts import text_for
from caravan_dialects.api.generation.run import Run
from caravan_dialects.text.assembler import TextOptions
from caravan_proto.messages.model import FillTokens
from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import MAX_SEED, SamplingParams
from caravan_scheduler.core.errors import DeadlineError, GenerationError, IncompleteGenerationError
from caravan_scheduler.core.generation import GenerationSpec, StoppingParams
from caravan_scheduler.core.request_metrics import Failure
from caravan_testing.requests import CountedRequests
from caravan_testing.scripted_engine import EOS_TOKEN, ScriptedEngine, Step, word

SPEC = GenerationSpec(prompt=(1,), sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=9))
FILL = FillTokens(prefix=-1, suffix=-2, middle=-3)
TOKENS = st.lists(st.integers(0, 9), max_size=20)


@dataclass
class Model:
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    metrics: CountedRequests = field(default_factory=CountedRequests)


@pytest.fixture
def model() -> Model:
    return Model()


def run_of(model: Model, stops: tuple[str, ...], *steps: Step) -> Run:
    model.engine.script = lambda _: steps
    return Run(ServedModel(model.engine, model.metrics), SPEC, TextOptions(stops=stops), arrived=0.0)


async def read_to_end(run: Run) -> None:
    async for ready in run:
        assert list(ready)


async def test_held_back_pieces_are_yielded_together_and_every_token_counts(model: Model) -> None:
    with run_of(model, ("bx",), word("a"), word("b"), word("c"), EOS_TOKEN) as run:
        texts = [[piece.text for piece in pieces] async for ready in run for pieces in ready]
    assert texts == [["a"], ["b", "c"], [""]]
    assert run.tokens == 4
    assert run.finish is FinishReason.EOS_TOKEN
    assert model.engine.all_closed


async def test_a_stop_string_closes_the_stream_without_another_token(model: Model) -> None:
    with run_of(model, ("b",), word("a"), word("b"), word("c"), EOS_TOKEN) as run:
        texts = ["".join(piece.text for piece in pieces) async for ready in run for pieces in ready]
        assert model.engine.all_closed
    assert texts == ["a", ""]
    assert model.engine.streams[0].sent == 2


async def test_an_error_is_raised_and_the_stream_is_closed(model: Model) -> None:
    with (
        pytest.raises(GenerationError, match="broken"),
        run_of(model, (), word("a"), GenerationError("broken")) as run,
    ):
        await read_to_end(run)
    assert model.engine.all_closed
    assert model.metrics.failures == {Failure.GENERATION: 1}


async def test_a_stream_that_ends_without_a_finish_reason_is_an_error(model: Model) -> None:
    with pytest.raises(IncompleteGenerationError), run_of(model, (), word("a")) as run:
        await read_to_end(run)


@pytest.mark.parametrize("steps", [[word("a"), word("b"), EOS_TOKEN], [[word("a"), word("b"), EOS_TOKEN]]])
async def test_a_reader_may_end_a_run_early(model: Model, steps: list[Step]) -> None:
    with run_of(model, (), *steps) as run:
        async for ready in run:
            for _ in ready:
                run.end()
    assert (run.tokens, run.finish) == (1, FinishReason.STOP_SEQUENCE)
    assert model.engine.all_closed


async def test_a_deadline_ends_a_whole_reply_with_the_text_so_far(model: Model) -> None:
    texts: list[str] = []
    with run_of(model, ("bx",), word("a"), word("b"), DeadlineError("late")) as run:
        await run.read(lambda pieces: texts.extend(piece.text for piece in pieces))
    assert texts == ["a", "b"]
    assert run.finish is FinishReason.LENGTH
    assert model.metrics.failures == {Failure.DEADLINE: 1}
    assert model.metrics.succeeded == 0


def test_a_part_of_a_message_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"`messages\[0\].content\[1\]` must be text.*'image_url'"):
        text_for("messages[0].content[1]", "image_url")


@pytest.mark.parametrize("kind", ["image", "input_image", "document", "input_file"])
def test_a_result_of_a_tool_says_that_there_was_something(kind: str) -> None:
    assert text_for("input[2].output[0]", kind, of_tool=True).strip("[]") in kind
    with pytest.raises(ValidationError, match="must be text"):
        text_for("input[2].content[0]", kind)


def test_a_result_of_a_tool_has_no_unknown_parts() -> None:
    with pytest.raises(ValidationError, match="must be text"):
        text_for("input[2].output[0]", "hologram", of_tool=True)


def test_the_first_choice_has_the_seed_of_the_request() -> None:
    assert [choice_seed(seed, 0) for seed in (0, 1, MAX_SEED)] == [0, 1, MAX_SEED]


def test_other_choices_have_outputs_of_splitmix64() -> None:
    # The reference implementation returns these numbers for the seeds 0 and 1234567.
    assert [choice_seed(0, index) for index in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert [choice_seed(1234567, index) for index in (1, 2)] == [6457827717110365317, 3203168211198807973]


def test_small_seeds_and_indices_give_different_seeds() -> None:
    seeds = [choice_seed(seed, index) for seed in range(300) for index in range(1, 33)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    # No other choice has the seed of a first choice.
    assert not set(seeds) & set(range(300))


@pytest.mark.parametrize(("begin", "prompt"), [(None, (7, -1, 1, 2, -2, 3, -3)), (-4, (-4, 7, -1, 1, 2, -2, 3, -3))])
def test_the_order_of_a_prompt(begin: int | None, prompt: tuple[int, ...]) -> None:
    fill = FillTokens(prefix=-1, suffix=-2, middle=-3, begin=begin)
    assert fill_prompt(fill, Gap(before=(1, 2), after=(3,), context=(7,))) == prompt


@given(before=TOKENS, after=TOKENS, context=TOKENS, limit=st.integers(3, 70))
def test_what_is_left_is_next_to_the_gap_and_fills_the_room(
    before: Sequence[int], after: Sequence[int], context: Sequence[int], limit: int
) -> None:
    gap = Gap(before=before, after=after, context=context)
    left = trimmed(FILL, gap, limit)
    assert list(before[len(before) - len(left.before) :]) == list(left.before)
    assert list(after[: len(left.after)]) == list(left.after)
    assert list(context[len(context) - len(left.context) :]) == list(left.context)
    assert len(fill_prompt(FILL, left)) == min(limit, len(fill_prompt(FILL, gap)))
    # Context goes before text does, and the text before the gap keeps three quarters of the room.
    if left.context:
        assert (left.before, left.after) == (before, after)
    if len(left.after) < len(after):
        assert len(left.after) >= (limit - 3) // 4
    if len(left.before) < len(before):
        assert len(left.before) >= (limit - 3) - (limit - 3) // 4
