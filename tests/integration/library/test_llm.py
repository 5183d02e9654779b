"""`LLM` over the toy model: what it returns and refuses, how calls end, and that nothing is left behind."""

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import caravan
from caravan import (
    LLM,
    AsyncLLM,
    ChoiceParameters,
    CompletionOutput,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from caravan.model_calls import OpenedModel
from caravan_scheduler.scheduler import Scheduler
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.model import BOS, ToyVocabulary
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import DEADLINE_S, eventually, wait_until

_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def _tokens(text: str) -> list[int]:
    return ToyVocabulary().tokenize(text, add_special=True, parse_special=True)


def _text(tokens: list[int]) -> str:
    pieces = [ToyVocabulary().piece(token) for token in tokens]
    return b"".join(piece.data for piece in pieces if not piece.special).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", backend="fake", parallel=4, ctx_size=1024, cache_ram=16, embeddings=True) as opened:
        yield opened


def test_every_prompt_gets_its_output_in_order(llm: LLM) -> None:
    prompts = [f"Prompt number {number}" for number in range(20)]
    outputs = llm.generate(prompts, _GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = expected_output(_tokens(prompt), 12, ignore_eos=True)
        (completion,) = output.outputs
        assert (output.prompt, output.prompt_token_ids, output.finished) == (prompt, _tokens(prompt), True)
        assert (completion.token_ids, completion.text) == (expected, _text(expected))
        assert (completion.finish_reason, completion.stop_reason, completion.logprobs) == ("length", None, None)
    assert len({output.request_id for output in outputs}) == len(prompts)


def test_prompts_come_in_the_forms_of_vllm(llm: LLM) -> None:
    ids = [BOS, *b"forms"]
    forms = ["forms", {"prompt": "forms"}, {"prompt_token_ids": ids}, ids]
    outputs = [output for form in forms for output in llm.generate(form, _GREEDY)]  # type: ignore[arg-type]
    assert [output.prompt for output in outputs] == ["forms", "forms", None, None]
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert len({output.outputs[0].text for output in outputs}) == 1


def test_the_second_of_two_equal_prompts_is_cached(llm: LLM) -> None:
    first, second = (llm.generate("It is said twice, word for word.", _GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens < 4
    assert len(first.prompt_token_ids) - 4 < second.num_cached_tokens < len(first.prompt_token_ids)


@pytest.mark.parametrize("layout", ["split", "unified"])
def test_the_next_model_finds_what_is_cached_in_files(layout: str, tmp_path: Path) -> None:
    def generate() -> RequestOutput:
        with LLM("toy.gguf", backend="fake", ctx_size=2048, cache_dir=str(tmp_path), kv_layout=layout) as llm:
            (output,) = llm.generate("one two three four " * 10, _GREEDY)
            return output

    assert generate().num_cached_tokens == 0
    again = generate()
    assert again.num_cached_tokens > len(again.prompt_token_ids) // 2


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    lengths = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], lengths)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]


def test_max_tokens_none_means_all_that_fit(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for prompt in ("whole", _tokens("whole")):
        (output,) = llm.generate(prompt, params)
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 1024


def test_n_outputs_draw_apart_and_a_seed_draws_again(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=16, ignore_eos=True)
    first, second = (llm.generate("drawn", params)[0].outputs for _ in range(2))
    assert [output.index for output in first] == [0, 1, 2]
    assert len({output.text for output in first}) == 3
    assert [output.text for output in first] == [output.text for output in second]


def test_the_best_outputs_are_returned(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=8, ignore_eos=True, logprobs=0)
    messages = [{"role": "user", "content": "drawn"}]
    ways: list[Callable[[SamplingParams], Sequence[CompletionOutput]]] = [
        lambda own: llm.generate("drawn", own)[0].outputs,
        lambda own: llm.chat(messages, own)[0].outputs,
    ]
    for outputs_of in ways:
        every = sorted(outputs_of(params), key=lambda output: -(output.cumulative_logprob or 0))
        best = outputs_of(replace(params, n=2, best_of=4, logprobs=None))
        assert [(output.index, output.text, output.logprobs) for output in best] == [
            (index, output.text, None) for index, output in enumerate(every[:2])
        ]
        choices: list[ChoiceParameters] = [{}, {"temperature": 0.1}]
        (one,) = outputs_of(replace(params, n=1, best_of=2, choice_parameters=choices))
        assert one.text in {output.text for output in outputs_of(replace(params, n=2, choice_parameters=choices))}


def test_what_is_streamed_cannot_be_ranked(llm: LLM) -> None:
    params = SamplingParams(n=2, best_of=3, max_tokens=2)
    for parts in (llm.stream("x", params), llm.stream_chat([{"role": "user", "content": "x"}], params)):
        with pytest.raises(RequestError, match=r"`best_of` > `n` is not supported when streaming\. Given: `best_of` 3"):
            list(parts)


def test_logprobs_of_output_and_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("logs", params)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    for token, found in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(found) == 2
        assert (found[token].rank, found[token].decoded_token) == (1, _text([token]))
    chosen = [found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token, entry in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]:
        assert entry is not None
        assert token in entry


def test_a_stop_string_ends_the_output(llm: LLM) -> None:
    (whole,) = llm.generate("stops", _GREEDY)
    stop = whole.outputs[0].text[4:6]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=["unseen", stop])
    (output,) = llm.generate("stops", params)
    assert output.outputs[0].text == whole.outputs[0].text[: whole.outputs[0].text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_a_stop_token_ends_the_output(llm: LLM) -> None:
    token = expected_output(_tokens("stops"), 12, ignore_eos=True)[3]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[token])
    (completion,) = llm.generate("stops", params)[0].outputs
    assert (completion.finish_reason, completion.stop_reason, completion.token_ids[-1]) == ("stop", token, token)


def test_an_output_keeps_to_its_structure(llm: LLM) -> None:
    for structure, allowed in (
        (StructuredOutputsParams(choice=["yes", "no"]), {"yes", "no"}),
        (StructuredOutputsParams(regex="[0-9]{3}"), {f"{number:03}" for number in range(1000)}),
    ):
        (output,) = llm.generate("Well?", SamplingParams(seed=3, structured_outputs=structure))
        assert output.outputs[0].text in allowed


def test_the_parts_of_a_stream_are_the_output(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=5, max_tokens=20, ignore_eos=True, logprobs=0)
    parts = list(llm.stream("streamed", params))
    whole = llm.generate("streamed", params)[0].outputs
    for index in range(2):
        mine = [part.outputs[0] for part in parts if part.outputs[0].index == index]
        assert "".join(part.text for part in mine) == whole[index].text
        assert [token for part in mine for token in part.token_ids] == whole[index].token_ids
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + ["length"]
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len({part.request_id for part in parts}) == 1


def test_a_stream_that_is_closed_ends_its_generation(llm: LLM) -> None:
    parts = llm.stream("endless", SamplingParams(max_tokens=900, ignore_eos=True))
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    assert len(llm.generate(["after"] * 4, _GREEDY)) == 4


def test_a_chat_is_rendered_with_the_template_of_the_model(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    (answer,) = llm.chat(messages, _GREEDY)
    assert answer.prompt_token_ids[-5:] == _tokens(prompt)[-5:]
    (same,) = llm.generate(answer.prompt_token_ids, _GREEDY)
    assert answer.outputs[0].text == same.outputs[0].text
    assert [output.outputs[0].text for output in llm.chat([messages, messages], _GREEDY)] == [
        answer.outputs[0].text
    ] * 2
    assert "".join(part.outputs[0].text for part in llm.stream_chat(messages, _GREEDY)) == answer.outputs[0].text


def test_a_chat_answers_by_schema(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    (answer,) = llm.chat([{"role": "user", "content": "?"}], SamplingParams(seed=1, max_tokens=60), schema=schema)
    assert set(json.loads(answer.outputs[0].text)) == {"ok"}


def test_a_chat_calls_a_tool_whole_or_streamed(llm: LLM) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "roll",
            "parameters": {
                "type": "object",
                "properties": {"n": {"enum": [1, 2]}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    }
    messages = [{"role": "user", "content": "Roll"}]
    params = SamplingParams(temperature=0, max_tokens=200)
    (answer,) = llm.chat(messages, params, tools=[tool], tool_choice="roll")
    (call,) = answer.outputs[0].tool_calls
    assert (call.name, answer.outputs[0].finish_reason) == ("roll", "tool_calls")
    assert json.loads(call.arguments) in ({"n": 1}, {"n": 2})
    *earlier, last = llm.stream_chat(messages, params, tools=[tool], tool_choice="roll")
    assert not any(part.outputs[0].tool_calls for part in earlier)
    assert [(one.name, one.arguments) for one in last.outputs[0].tool_calls] == [(call.name, call.arguments)]


def test_beams_come_best_first(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=6, use_beam_search=True, ignore_eos=True, logprobs=0)
    outputs = llm.generate("beams", params)[0].outputs
    scores = [output.cumulative_logprob or 0.0 for output in outputs]
    assert scores == sorted(scores, reverse=True)
    greedy = llm.generate("beams", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0))[0].outputs[
        0
    ]
    assert scores[0] >= (greedy.cumulative_logprob or 0.0)


def test_vectors_and_scores(llm: LLM) -> None:
    first, second = llm.embed(["a text", "another"])
    assert first.prompt_token_ids == _tokens("a text")
    assert sum(value * value for value in first.outputs.embedding) == pytest.approx(1.0, abs=1e-5)
    product = sum(a * b for a, b in zip(first.outputs.embedding, second.outputs.embedding, strict=True))
    same, other = llm.score("a text", ["a text", "another"])
    assert (same.outputs.score, other.outputs.score) == pytest.approx((1.0, product), abs=1e-5)
    with pytest.raises(caravan.RequestError, match="as many texts on both sides"):
        llm.score(["a", "b"], ["a", "b", "c"])


def test_text_becomes_tokens_and_back(llm: LLM) -> None:
    assert llm.tokenize("né") == [BOS, *"né".encode()]
    assert llm.detokenize(llm.tokenize("né")) == "né"
    assert llm.detokenize([]) == ""


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", SamplingParams(), "`prompt` cannot be empty"),
        (["p", ""], SamplingParams(), "prompt 1: `prompt` cannot be empty"),
        ("p" * 2000, SamplingParams(), "`prompt` tokens"),
        ([BOS, 9999], SamplingParams(), "token ids must be >= 0 and < 260"),
        ("p", SamplingParams(logprobs=99), "`logprobs` must be >= 0 and <= 32"),
        ("p", [SamplingParams()] * 2, "one entry of sampling_params for each of 1. Given: 2"),
        ([["a"]], SamplingParams(), "a prompt is a text, a list of token ids"),
    ],
)
def test_a_wrong_request_is_refused(llm: LLM, prompts: object, params: object, message: str) -> None:
    with pytest.raises(caravan.RequestError) as refused:
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert message in str(refused.value)
    assert isinstance(refused.value, ValueError)


def test_an_adapter_that_is_not_there_is_refused(llm: LLM) -> None:
    with pytest.raises(caravan.RequestError, match="there is no adapter 'x'"):
        llm.generate("p", adapter="x")


def test_threads_share_a_model(llm: LLM) -> None:
    texts: dict[str, str] = {}

    def work(prompt: str) -> None:
        texts[prompt] = llm.generate(prompt, _GREEDY)[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {prompt: _text(expected_output(_tokens(prompt), 12, ignore_eos=True)) for prompt in texts}
    assert len(texts) == 6


async def test_the_asynchronous_calls_return_the_same(llm: LLM) -> None:
    async with AsyncLLM("toy.gguf", backend="fake", embeddings=True) as other:
        outputs = await asyncio.gather(*(other.generate(f"p{number}", _GREEDY) for number in range(6)))
        expected = llm.generate([f"p{number}" for number in range(6)], _GREEDY)
        assert [one.outputs[0].text for (one,) in outputs] == [one.outputs[0].text for one in expected]
        parts = [part.outputs[0].text async for part in other.stream("p0", _GREEDY)]
        assert "".join(parts) == expected[0].outputs[0].text
        messages = [{"role": "user", "content": "Hello"}]
        answer = (await other.chat(messages, _GREEDY))[0].outputs[0].text
        assert "".join([part.outputs[0].text async for part in other.stream_chat(messages, _GREEDY)]) == answer
        assert (await other.embed("x"))[0].outputs == llm.embed("x")[0].outputs
        assert (await other.score("x", "y"))[0].outputs == llm.score("x", "y")[0].outputs
        assert await other.detokenize(await other.tokenize("text")) == "text"


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
        (output,) = slow.generate("endless", SamplingParams(max_tokens=9000, ignore_eos=True, timeout=4.0))
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


def test_the_defaults_of_the_model_are_known(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    with LLM("toy.gguf", backend="fake", parallel=1, ctx_size=256, temp=0.5, top_k=20, max_tokens=7) as other:
        assert other.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=20, max_tokens=7)


async def test_a_model_that_nobody_waits_for_has_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, goes_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(OpenedModel):
        def __init__(self, *given: Any) -> None:
            loading.set()
            assert goes_on.wait(DEADLINE_S)
            super().__init__(*given)

        def close(self) -> None:
            super().close()
            closed.set()

    monkeypatch.setattr("caravan.llm.OpenedModel", Slow)
    llm = AsyncLLM("toy.gguf", backend="fake")
    opening = asyncio.create_task(llm.__aenter__())
    await eventually(loading.is_set, "it loads")
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    goes_on.set()
    await eventually(lambda: llm._close is not None, "it is loaded")
    await llm.close()
    assert closed.is_set()
