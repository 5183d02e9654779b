"""Functions that change the logits of an `LLM`, over the toy model."""

import asyncio
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import caravan
from caravan import LLM, AsyncLLM, SamplingParams
from caravan_shard.backends.toy.model import TOY_FACTS
from caravan_testing.http_server import sample_of
from caravan_testing.waiting import eventually

_SIZE = TOY_FACTS.vocabulary_size
_PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)
_GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def with_functions(params: SamplingParams, *functions: Any) -> SamplingParams:
    return changed_params(params, logits_processors=functions)


def changed_params(params: SamplingParams, **fields: Any) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__dataclass_fields__} | fields)


def unlike_the_last(output: list[int], logits: Any) -> Any:
    """A pure function: tokens become likelier the further they are from the last one; letters only."""
    ids = np.arange(_SIZE)
    letters = (ids >= ord("a")) & (ids <= ord("z"))
    return np.where(letters, logits + 0.1 * np.abs(ids - output[-1] if output else ids), -np.inf)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", backend="fake", parallel=4, ctx_size=1024, speculate=4) as opened:
        yield opened


def ids_of(llm: LLM, prompt: str, params: SamplingParams) -> list[int]:
    (output,) = llm.generate(prompt, params)
    return [*output.outputs[0].token_ids]


@pytest.mark.parametrize("params", [_PARAMS, _GREEDY], ids=["drawn", "greedy"])
def test_the_output_is_chosen_from_what_a_function_returns(llm: LLM, params: SamplingParams) -> None:
    seen: list[list[int]] = []

    def note(output: list[int], logits: Any) -> Any:
        assert (logits.shape, logits.dtype) == ((_SIZE,), np.float32)
        seen.append(output)
        return logits

    changed = ids_of(llm, "letters", with_functions(params, unlike_the_last, note))
    assert seen == [changed[:count] for count in range(24)]
    assert all(ord("a") <= token <= ord("z") for token in changed)
    assert changed != ids_of(llm, "letters", params)
    # A function that changes nothing changes no draw.
    assert ids_of(llm, "letters", with_functions(params, note)) == ids_of(llm, "letters", params)


def test_choices_chats_and_streams_use_it_too(llm: LLM) -> None:
    seen = set()

    def only_x(output: list[int], logits: Any) -> Any:
        seen.add(tuple(output))
        return np.where(np.arange(_SIZE) == ord("x"), 0.0, -np.inf)

    params = with_functions(changed_params(_PARAMS, n=2, max_tokens=3), only_x)
    (output,) = llm.generate("a", params)
    assert [choice.text for choice in output.outputs] == ["xxx", "xxx"]
    assert "".join(part.outputs[0].text for part in llm.stream("a", with_functions(_PARAMS, only_x))) == "x" * 24
    assert len(seen) == 24


def test_logprobs_stay_those_of_the_model(llm: LLM) -> None:
    plain = changed_params(_GREEDY, logprobs=0, max_tokens=1)
    (output,) = llm.generate("p", with_functions(plain, lambda _output, logits: -logits))
    assert output.outputs[0].cumulative_logprob is not None
    assert output.outputs[0].cumulative_logprob < -2.0


def test_a_constraint_prevails_over_what_a_function_wants(llm: LLM) -> None:
    outputs = caravan.StructuredOutputsParams(choice=["yes", "no"])
    params = changed_params(_GREEDY, ignore_eos=False, structured_outputs=outputs)

    def prefer_n(output: list[int], logits: Any) -> Any:
        logits[ord("n")] += 100
        logits[ord("z")] += 200
        return logits

    (output,) = llm.generate("?", with_functions(params, prefer_n))
    assert output.outputs[0].text == "no"


def test_drafts_are_verified_through_the_function(llm: LLM) -> None:
    text = "abcabcabcabcabcabcabcabc"

    def repeat(output: list[int], logits: Any) -> Any:
        logits[ord(text[len(output) % 3])] += 1_000
        return logits

    params = with_functions(_GREEDY, repeat)
    assert ids_of(llm, text, changed_params(params, speculate=4)) == [*text.encode()]
    assert ids_of(llm, text, changed_params(params, speculate=0)) == [*text.encode()]


def test_an_interrupted_output_is_the_same() -> None:
    prompts = [f"prompt {number} of many" for number in range(12)]
    params = with_functions(changed_params(_PARAMS, max_tokens=60), unlike_the_last)
    with LLM("toy.gguf", backend="fake", parallel=12, ctx_size=4096) as large:
        expected = [output.outputs[0].token_ids for output in large.generate(prompts, params)]
    with LLM("toy.gguf", backend="fake", parallel=12, ctx_size=320, cache_ram=0, kv_layout="unified") as small:
        # Now it expects short outputs, and starts too many.
        small.generate([f"{number}" for number in range(20)], changed_params(_PARAMS, max_tokens=3))
        outputs = [output.outputs[0].token_ids for output in small.generate(prompts, params)]
        metrics = small._opened.local._metrics
        recomputed = asyncio.run(sample_of(metrics, 'caravan_request_preemptions_total{how="recompute"}'))
    assert outputs == expected
    assert recomputed > 0


class _Boom(Exception):
    pass


def boom_after(count: int) -> Any:
    def boom(output: list[int], logits: Any) -> Any:
        if len(output) == count:
            raise _Boom("at last")
        return logits

    return boom


@pytest.mark.parametrize("count", [0, 5])
def test_an_exception_ends_its_request_and_disturbs_no_other(llm: LLM, count: int) -> None:
    expected = ids_of(llm, "the other", _PARAMS)
    others: list[list[int]] = []
    beside = threading.Thread(target=lambda: others.extend(ids_of(llm, "the other", _PARAMS) for _ in range(5)))
    beside.start()
    for _ in range(5):
        with pytest.raises(caravan.LogitsProcessorError, match="a logits processor failed: _Boom: at last") as caught:
            llm.generate("it fails", with_functions(changed_params(_PARAMS, n=2), boom_after(count)))
        assert isinstance(caught.value.__cause__, _Boom)
    beside.join()
    assert others == [expected] * 5


def test_a_stream_yields_no_token_that_was_chosen_without_the_function(llm: LLM) -> None:
    expected = ids_of(llm, "streamed", _PARAMS)[:5]
    parts = llm.stream("streamed", with_functions(_PARAMS, boom_after(5)))
    got: list[int] = []

    def read() -> None:
        got.extend(token for part in parts for token in part.outputs[0].token_ids)

    with pytest.raises(caravan.LogitsProcessorError):
        read()
    assert got == expected[: len(got)]


@pytest.mark.parametrize(
    ("returned", "message"),
    [(None, "Given: None"), (np.zeros(3), r"Given: shape \(3,\)"), (np.full(_SIZE, np.nan), "Given: NaN or inf")],
    ids=["nothing", "shape", "NaN"],
)
def test_what_is_no_logits_is_an_error_that_says_so(llm: LLM, returned: Any, message: str) -> None:
    with pytest.raises(caravan.LogitsProcessorError, match=message):
        llm.generate("x", with_functions(_PARAMS, lambda _output, _logits: returned))


def test_refusals_name_the_field(llm: LLM) -> None:
    with pytest.raises(caravan.RequestError, match="`logits_processors` must be functions"):
        llm.generate("x", with_functions(_PARAMS, 3))
    with pytest.raises(caravan.RequestError, match="`logits_processors` cannot be used with `use_beam_search`"):
        SamplingParams(use_beam_search=True, n=2, logits_processors=[unlike_the_last])
    with caravan.Client("http://127.0.0.1:9") as client:
        for call in (
            client.generate,
            lambda prompt, params: client.chat([{"role": "user", "content": prompt}], params),
        ):
            with pytest.raises(caravan.RequestError, match="`logits_processors` are functions of this program"):
                call("x", with_functions(_PARAMS, unlike_the_last))


async def test_asyncio_has_it_and_a_cancelled_call_calls_it_no_more() -> None:
    calls = []

    def slow(output: list[int], logits: Any) -> Any:
        calls.append(len(output))
        return logits

    async with AsyncLLM("toy.gguf", backend="fake", ctx_size=4096) as llm:
        params = with_functions(changed_params(_PARAMS, max_tokens=3000), slow)
        task = asyncio.create_task(llm.generate("x", params))
        await eventually(lambda: len(calls) > 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        count = len(calls)
        (output,) = await llm.generate("y", with_functions(changed_params(_PARAMS, max_tokens=4), slow))
        assert len(output.outputs[0].token_ids) == 4
        # At most one was being called.
        assert len(calls) <= count + 1 + 4


def test_a_model_keeps_no_function_of_a_request_that_has_ended(llm: LLM) -> None:
    def keep(output: list[int], logits: Any) -> Any:
        return logits

    watched = weakref.ref(keep)
    params = with_functions(_PARAMS, keep)
    ids_of(llm, "kept", params)
    del keep, params
    assert watched() is None


def test_an_executor_samples_through_it() -> None:
    with caravan.Executor("toy.gguf", backend="fake", ctx_size=256) as executor:
        conversation = executor.create()
        conversation.prompt("hello")
        executor.infer()
        seen: list[list[int]] = []

        def only_q(output: list[int], logits: Any) -> Any:
            seen.append(output)
            return np.where(np.arange(_SIZE) == ord("q"), 0.0, -np.inf)

        tokens = [token.id for token in conversation.generate(3, with_functions(_PARAMS, only_q))]
        assert tokens == [ord("q")] * 3
        assert seen == [[], [ord("q")], [ord("q")] * 2]
        with pytest.raises(caravan.LogitsProcessorError, match="at last"):
            conversation.sample(with_functions(_PARAMS, boom_after(3)))
