"""`LLMEngine` over the toy model, in the loops that programs have for vLLM's."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from caravan import (
    LLM,
    AsyncLLMEngine,
    ClosedError,
    DeadlineError,
    EngineArgs,
    LLMEngine,
    LogitsProcessorError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from caravan_testing.waiting import eventually

_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_ENDLESS = SamplingParams(temperature=0, max_tokens=9000, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", backend="fake", parallel=4, ctx_size=16384, kv_layout="unified") as opened:
        yield opened


def _run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step until nothing is unfinished; return the outputs of each request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_the_example_of_vllm_runs_with_the_import_changed() -> None:
    """The loop of vLLM's `llm_engine_example.py`."""
    engine = LLMEngine.from_engine_args(EngineArgs(model="toy.gguf", backend="fake", parallel=2))
    test_prompts = [
        ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    request_id, finished = 0, list[RequestOutput]()
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        for request_output in engine.step():
            if request_output.finished:
                finished.append(request_output)
    engine.close()
    by_id = {output.request_id: output for output in finished}
    assert sorted(by_id) == ["0", "1", "2"]
    assert by_id["0"].prompt_logprobs is not None
    assert [len(output.outputs) for output in map(by_id.__getitem__, "012")] == [1, 1, 2]


def test_outputs_grow_to_those_of_a_model(llm: LLM) -> None:
    engine = llm.llm_engine
    params = SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    prompts = [f"prompt {number}" for number in range(6)]
    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, params)
    assert engine.get_num_unfinished_requests() == 6
    found = _run(engine)
    for number, expected in enumerate(llm.generate(prompts, params)):
        *earlier, last = found[f"r{number}"]
        assert (last.prompt, last.prompt_token_ids) == (prompts[number], expected.prompt_token_ids)
        assert [(one.index, one.text, one.token_ids, one.finish_reason) for one in last.outputs] == [
            (one.index, one.text, one.token_ids, one.finish_reason) for one in expected.outputs
        ]
        for mine, theirs in zip(last.outputs, expected.outputs, strict=True):
            assert mine.logprobs == theirs.logprobs
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob)
        assert last.prompt_logprobs == expected.prompt_logprobs
        assert not any(one.finished for one in earlier)
        for one in earlier:
            assert last.outputs[0].text.startswith(one.outputs[0].text)
    assert engine.step() == []


def test_an_aborted_request_is_no_more(llm: LLM) -> None:
    engine = llm.llm_engine
    for name in ("a", "b", "c"):
        engine.add_request(name, name, _ENDLESS)
    with pytest.raises(RequestError, match="request_id must differ"):
        engine.add_request("a", "again", _GREEDY)
    assert engine.step()
    engine.abort_request("a")
    engine.abort_request(["b", "c", "unknown"])
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    engine.add_request("a", "again", _GREEDY)
    assert _run(engine)["a"][-1].outputs[0].token_ids == llm.generate("again", _GREEDY)[0].outputs[0].token_ids


def test_a_wrong_request_is_refused_when_it_is_added(llm: LLM) -> None:
    engine: Any = llm.llm_engine
    wrong: tuple[object, ...]
    for wrong in (
        ("a", 5, _GREEDY),
        ("a", "", _GREEDY),
        ("a", "x" * 20_000, _GREEDY),
        ("a", "x", {}),
        (1, "x", _GREEDY),
    ):
        with pytest.raises(RequestError):
            engine.add_request(*wrong)
    assert not engine.has_unfinished_requests()


def test_a_request_that_fails_is_named_and_others_go_on(llm: LLM) -> None:
    def fails(_output: list[int], _logits: object) -> object:
        raise ZeroDivisionError

    engine = llm.llm_engine
    engine.add_request("good", "good", _GREEDY)
    engine.add_request("bad", "bad", SamplingParams(logits_processors=[fails]))
    failed, finished = list[str](), list[str]()
    while engine.has_unfinished_requests():
        try:
            finished += [output.request_id for output in engine.step() if output.finished]
        except LogitsProcessorError as error:
            failed.append(error.request_id)
    assert (failed, finished) == (["bad"], ["good"])


def test_closing_the_model_ends_its_requests() -> None:
    with LLM("toy.gguf", backend="fake", ctx_size=16384) as llm:
        engine = llm.llm_engine
        engine.add_request("a", "a", _ENDLESS)
        engine.step()
    assert not engine.has_unfinished_requests()
    with pytest.raises(ClosedError):
        engine.add_request("b", "b", _GREEDY)
    with pytest.raises(ClosedError):
        engine.step()


async def test_an_asynchronous_engine_streams_outputs_by_id() -> None:
    engine = AsyncLLMEngine.from_engine_args(EngineArgs("toy.gguf", backend="fake", ctx_size=16384))
    async with engine:
        outputs = [output async for output in engine.generate("hello", _GREEDY, "0")]
        assert outputs[-1].finished
        assert outputs[-1].request_id == "0"
        (whole,) = await engine._llm.generate("hello", _GREEDY)
        assert outputs[-1].outputs[0].text == whole.outputs[0].text
        with pytest.raises(RequestError, match="must differ"):
            await asyncio.gather(*(anext(engine.generate("x", _ENDLESS, "same")) for _ in range(2)))

        seen = list[RequestOutput]()

        async def follow() -> None:
            async for output in engine.generate("endless", _ENDLESS, "1"):
                seen.append(output)

        following = asyncio.create_task(follow())
        await eventually(lambda: len(seen) > 2, "it has begun")
        await engine.abort("1")
        await following
        assert not seen[-1].finished
        with pytest.raises(DeadlineError):
            async for _ in engine.generate("x", SamplingParams(timeout=1e-9), "2"):
                pass


async def test_an_id_is_free_once_its_request_is_aborted() -> None:
    async with AsyncLLMEngine("toy.gguf", backend="fake", ctx_size=16384) as engine:
        aborted = engine.generate("endless", _ENDLESS, "1")
        await anext(aborted)
        await engine.abort("1")
        following = engine.generate("hello", _GREEDY, "1")
        outputs = [await anext(following)]
        assert [output async for output in aborted] == []
        with pytest.raises(RequestError, match="must differ"):
            await anext(engine.generate("x", _GREEDY, "1"))
        outputs += [output async for output in following]
        (whole,) = await engine._llm.generate("hello", _GREEDY)
        assert outputs[-1].outputs[0].text == whole.outputs[0].text


async def test_an_id_is_taken_while_the_model_is_loaded() -> None:
    engine = AsyncLLMEngine("toy.gguf", backend="fake", ctx_size=16384)
    streams = [engine.generate("x", _ENDLESS, "same") for _ in range(2)]
    found = await asyncio.gather(*map(anext, streams), return_exceptions=True)
    assert [type(one) for one in found] == [RequestOutput, RequestError]
    await streams[0].aclose()
    await engine.close()
