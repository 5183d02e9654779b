"""A generation from its submission to its end."""

from dataclasses import dataclass, field

import pytest

from caravan_dialects.api.generation.models import ServedModel
from caravan_dialects.api.generation.run import Run
from caravan_dialects.text.assembler import TextOptions
from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import SamplingParams
from caravan_scheduler.core.errors import DeadlineError, GenerationError, IncompleteGenerationError
from caravan_scheduler.core.generation import GenerationSpec, StoppingParams
from caravan_scheduler.core.request_metrics import Failure
from caravan_testing.counted_requests import CountedRequests
from caravan_testing.scripted_engine import EOS_TOKEN, ScriptedEngine, Step, word

SPEC = GenerationSpec(prompt=(1,), sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=9))


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
