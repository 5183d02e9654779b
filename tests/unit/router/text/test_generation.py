import pytest

from caravan_router.core.errors import DeadlineError, GenerationError
from caravan_router.core.generation import GenerationSpec
from caravan_router.core.sampling import FinishReason, SamplingParams, StoppingParams
from caravan_router.text.generation import Generation, IncompleteGenerationError
from caravan_testing.scripted_engine import EOS_TOKEN, ScriptedEngine, Step, word

SPEC = GenerationSpec(prompt=(1,), sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=9))


def start(stops: list[str], *steps: Step) -> tuple[ScriptedEngine, Generation, list[int]]:
    engine = ScriptedEngine(script=lambda _: steps)
    seen: list[int] = []
    return engine, Generation(engine.submit(SPEC), stops, lambda: seen.append(1)), seen


async def test_pieces_come_as_they_are_released_and_every_token_is_counted() -> None:
    engine, generation, seen = start(["bx"], word("a"), word("b"), word("c"), EOS_TOKEN)
    with generation:
        texts = [[piece.text for piece in pieces] async for pieces in generation]
    assert texts == [["a"], ["b", "c"], [""]]
    assert len(seen) == 4
    assert generation.finish is FinishReason.EOS_TOKEN
    assert engine.all_closed


async def test_a_stop_string_closes_the_stream_before_it_is_read_again() -> None:
    engine, generation, _ = start(["b"], word("a"), word("b"), word("c"), EOS_TOKEN)
    with generation:
        texts = ["".join(piece.text for piece in pieces) async for pieces in generation]
        assert engine.all_closed
    assert texts == ["a", ""]
    assert engine.streams[0].sent == 2


async def test_an_error_passes_and_the_stream_is_closed() -> None:
    engine, generation, _ = start([], word("a"), GenerationError("broken"))
    with pytest.raises(GenerationError, match="broken"), generation:
        async for _ in generation:
            pass
    assert engine.all_closed


async def test_an_end_without_a_reason_is_an_error() -> None:
    _, generation, _ = start([], word("a"))
    with pytest.raises(IncompleteGenerationError), generation:
        async for _ in generation:
            pass


async def test_a_cut_gives_back_what_was_held_and_closes_the_stream() -> None:
    engine, generation, _ = start(["bx"], word("a"), word("b"), DeadlineError("too late"))
    with generation:
        assert [piece.text for piece in await anext(generation)] == ["a"]
        with pytest.raises(DeadlineError):
            await anext(generation)
        (last,) = generation.cut()
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
    assert (last.text, last.finish) == ("b", FinishReason.LENGTH)
    assert generation.finish is FinishReason.LENGTH
    assert engine.all_closed
