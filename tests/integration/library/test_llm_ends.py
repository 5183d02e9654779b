"""How calls of an `LLM` end otherwise than by their last token: interrupts, timeouts, closing, engines that fail."""

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import caravan
from caravan import LLM, AsyncLLM, SamplingParams
from caravan_scheduler.scheduler import Scheduler
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.model import ToyVocabulary
from caravan_testing.waiting import DEADLINE_S, eventually, wait_until

_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_call_and_no_other() -> None:
    with (
        LLM("slow.gguf", backend="fake", parallel=2, ctx_size=20_000, fake_step_ms=5.0) as slow,
        LLM("toy.gguf", backend="fake") as other,
    ):

        def interrupt() -> None:
            wait_until(lambda: bool(slow._opened.loop._calls), "the call runs")
            signal.raise_signal(signal.SIGINT)

        beside = other.stream("beside", _GREEDY)
        part = next(beside)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            slow.generate("endless", SamplingParams(max_tokens=9000, ignore_eos=True))
        thread.join()
        # The two sequences are free.
        assert len(slow.generate(["after"] * 2, _GREEDY)) == 2
        assert [part, *beside][-1].finished


def test_a_timeout_keeps_what_is_there() -> None:
    with LLM("slow.gguf", backend="fake", parallel=2, ctx_size=20_000, fake_step_ms=5.0) as slow:
        (output,) = slow.generate("endless", SamplingParams(max_tokens=9000, ignore_eos=True, timeout=1.5))
        assert output.outputs[0].finish_reason == "length"
        assert 0 < len(output.outputs[0].token_ids) < 9000


def test_closing_frees_the_model_after_the_text_that_a_cancelled_call_tokenizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, go_on = threading.Event(), threading.Event()
    steps: list[str] = []
    tokenize, close = ToyVocabulary.tokenize, ToyBackend.close

    def held(vocabulary: ToyVocabulary, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        began.set()
        assert go_on.wait(DEADLINE_S)
        steps.append("tokenized")
        return tokenize(vocabulary, text, add_special=add_special, parse_special=parse_special)

    def noted(backend: ToyBackend) -> None:
        close(backend)
        steps.append("freed")

    monkeypatch.setattr(ToyVocabulary, "tokenize", held)
    monkeypatch.setattr(ToyBackend, "close", noted)
    llm = LLM("toy.gguf", backend="fake")

    def call() -> None:
        with pytest.raises(caravan.ClosedError):
            llm.generate("a text")

    calling, closing = threading.Thread(target=call), threading.Thread(target=llm.close)
    calling.start()
    assert began.wait(DEADLINE_S)
    closing.start()
    # Its caller has gone; its thread goes on.
    calling.join(DEADLINE_S)
    assert closing.is_alive()
    assert steps == []
    go_on.set()
    closing.join(DEADLINE_S)
    assert steps == ["tokenized", "freed"]


def test_a_closed_model_says_so() -> None:
    llm = LLM("toy.gguf", backend="fake")
    ended: list[Exception] = []

    def endless() -> None:
        try:
            llm.generate("endless", SamplingParams(max_tokens=8000, ignore_eos=True))
        except caravan.ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=endless)
    parts = llm.stream("other", SamplingParams(max_tokens=1000, ignore_eos=True))
    next(parts)
    thread.start()
    llm.close()
    llm.close()
    thread.join()
    for call in (lambda: llm.generate("p"), lambda: next(parts), lambda: next(llm.stream("p")), lambda: llm.embed("p")):
        with pytest.raises(caravan.ClosedError):
            call()
    assert len(ended) <= 1


class _Bug(Exception):
    """What the scheduler meets."""


@pytest.fixture
def scheduler_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return what lets the schedulers of the models that the test has opened fail with each event, or work again."""
    opened: list[object] = []
    make, handle = Scheduler.__init__, Scheduler.handle

    def note(scheduler: Scheduler, *given: Any, **named: Any) -> None:
        opened.append(scheduler)
        make(scheduler, *given, **named)

    def fail(scheduler: Scheduler, *given: Any) -> Any:
        # The model that all tests share has a timer.
        if any(scheduler is one for one in opened):
            raise _Bug("an invariant is violated")
        return handle(scheduler, *given)

    monkeypatch.setattr(Scheduler, "__init__", note)
    return lambda fails: monkeypatch.setattr(Scheduler, "handle", fail if fails else handle)


def test_a_scheduler_that_fails_ends_the_calls_under_way_and_no_later_one(
    scheduler_fails: Callable[[bool], None],
) -> None:
    endless = SamplingParams(max_tokens=8000, ignore_eos=True)
    with LLM("toy.gguf", backend="fake", ctx_size=20_000, parallel=4) as llm:
        expected = llm.generate("after", _GREEDY)[0].outputs[0].token_ids
        parts = llm.stream("other", endless)
        next(parts)
        scheduler_fails(True)
        with pytest.raises(caravan.GenerationError, match="the request has met a bug of the router"):
            list(parts)
        scheduler_fails(False)
        assert llm.generate("after", _GREEDY)[0].outputs[0].token_ids == expected


async def test_a_scheduler_that_fails_ends_asynchronous_calls(scheduler_fails: Callable[[bool], None]) -> None:
    endless = SamplingParams(max_tokens=8000, ignore_eos=True)
    async with AsyncLLM("toy.gguf", backend="fake", ctx_size=20_000) as llm:
        running = [llm.stream(name, endless) for name in ("one", "other")]
        for parts in running:
            await anext(parts)
        scheduler_fails(True)
        for parts in running:
            with pytest.raises(caravan.GenerationError, match="the request has met a bug of the router"):
                async for _part in parts:
                    pass
        scheduler_fails(False)
        assert (await llm.generate("after", _GREEDY))[0].finished


def test_a_scheduler_that_always_fails_ends_the_model(scheduler_fails: Callable[[bool], None]) -> None:
    before = threading.active_count()
    with LLM("toy.gguf", backend="fake") as llm:
        scheduler_fails(True)

        def refusal() -> caravan.CaravanError:
            with pytest.raises(caravan.CaravanError) as raised:
                llm.generate("p")
            return raised.value

        # The first requests end by the bug, and then the engine.
        ended = wait_until(refusal, "the model has failed", lambda error: isinstance(error, caravan.ClosedError))
        assert str(ended) == "the model has failed: _Bug: an invariant is violated"
        assert isinstance(ended.__cause__, _Bug)
    wait_until(threading.active_count, "its threads have ended", lambda count: count <= before)


def test_a_model_whose_scheduler_always_fails_is_not_opened(scheduler_fails: Callable[[bool], None]) -> None:
    scheduler_fails(True)
    with pytest.raises(caravan.ClosedError, match="the model has failed: _Bug: an invariant"):
        LLM("toy.gguf", backend="fake")


async def test_a_model_that_cannot_be_opened_leaves_nothing() -> None:
    before = threading.active_count()
    with pytest.raises(caravan.ModelError, match=r"nowhere\.gguf"):
        LLM("nowhere.gguf")
    with pytest.raises(TypeError, match="unknown options: cells"):
        LLM("toy.gguf", cells=1)  # type: ignore[call-arg]
    # The thread that was to load the model ends by itself.
    await eventually(lambda: threading.active_count() <= before)


async def test_cancelling_an_asynchronous_call_ends_its_generation() -> None:
    async with AsyncLLM("toy.gguf", backend="fake", parallel=1, ctx_size=8000) as llm:
        call = asyncio.create_task(llm.generate("endless", SamplingParams(max_tokens=7000, ignore_eos=True)))
        async for _part in llm.stream("q", _GREEDY):
            break
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await llm.generate("after", _GREEDY))[0].finished
    with pytest.raises(caravan.ClosedError):
        await llm.generate("p")


async def test_an_asynchronous_model_is_opened_first() -> None:
    with pytest.raises(caravan.ClosedError, match="not open"):
        await AsyncLLM("toy.gguf", backend="fake").generate("p")
