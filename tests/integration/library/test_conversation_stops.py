"""Outputs of hand-stepped conversations end as those of `LLM.generate` over the toy model, in tokens and text."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import caravan
from caravan import (
    LLM,
    AsyncExecutor,
    Conversation,
    Executor,
    SamplingParams,
    State,
    StructuredOutputsParams,
    Token,
    executor_sampling,
)

_OPTIONS: dict[str, Any] = {"backend": "fake", "ctx_size": 1024, "parallel": 2, "kv_layout": "unified"}
_PROMPT = "Where it ends"
_GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", **_OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor("toy.gguf", **_OPTIONS) as made:
        yield made


@pytest.fixture
def conversation(executor: Executor) -> Iterator[Conversation]:
    with executor.create() as made:
        made.prompt(_PROMPT)
        yield made


@pytest.fixture(scope="module")
def whole(llm: LLM) -> str:
    """The text of 40 tokens, a character each."""
    (output,) = llm.generate(_PROMPT, _GREEDY)
    assert len(output.outputs[0].text) == 40
    return output.outputs[0].text


def _text(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def _check_as_generated(llm: LLM, conversation: Conversation, params: SamplingParams, tokens: list[Token]) -> None:
    (expected,) = llm.generate(_PROMPT, params)
    (output,) = expected.outputs
    assert (_text(tokens), [token.id for token in tokens]) == (output.text, list(output.token_ids))
    appended = tokens if output.finish_reason == "length" else tokens[:-1]
    assert conversation.tokens == [*expected.prompt_token_ids, *(token.id for token in appended)]
    assert conversation.state is State.READY


@pytest.mark.parametrize("kept", [False, True], ids=["cut", "kept"])
@pytest.mark.parametrize("as_argument", [False, True], ids=["in parameters", "as argument"])
def test_an_output_ends_at_a_stop_string_that_spans_tokens(
    llm: LLM, conversation: Conversation, whole: str, as_argument: bool, kept: bool
) -> None:
    stops = ["nowhere", whole[10:14]]
    params = replace(_GREEDY, stop=stops, include_stop_str_in_output=kept)
    given = replace(params, stop=None) if as_argument else params
    tokens = list(conversation.generate(sampler=given, stop=stops if as_argument else None))
    assert _text(tokens) == whole[: whole.index(stops[1]) + (4 if kept else 0)]
    _check_as_generated(llm, conversation, params, tokens)


def test_a_begun_stop_string_that_does_not_come_is_text(llm: LLM, conversation: Conversation, whole: str) -> None:
    params = replace(_GREEDY, stop=[whole[10:14] + "never", whole[-2:] + "never"])
    tokens = list(conversation.generate(sampler=params))
    assert _text(tokens) == whole
    _check_as_generated(llm, conversation, params, tokens)


def test_strings_and_ids_of_both_places_count(llm: LLM, executor: Executor, whole: str) -> None:
    early, late = whole[5], whole[20:24]
    assert whole.index(early) < whole.index(late)
    for params, stop in (
        (replace(_GREEDY, stop_token_ids=[ord(early)]), late),
        (replace(_GREEDY, stop=late), ord(early)),
        (replace(_GREEDY, stop=late), [np.int64(ord(early)), "nowhere"]),
        (_GREEDY, [late, ord(early)]),
    ):
        with executor.create() as conversation:
            conversation.prompt(_PROMPT)
            tokens = list(conversation.generate(sampler=params, stop=stop))  # type: ignore[arg-type]
            both = replace(_GREEDY, stop=late, stop_token_ids=[ord(early)])
            _check_as_generated(llm, conversation, both, tokens)
            assert tokens[-1].id == ord(early)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=None),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias={257: 100.0}),
        SamplingParams(temperature=0, max_tokens=5, logit_bias={257: 100.0}),
        SamplingParams(
            temperature=0, max_tokens=5, logit_bias={256: 100.0}, skip_special_tokens=False, stop_token_ids=[1]
        ),
    ],
    ids=["default", "three", "all that fit", "end tokens", "end token", "control tokens"],
)
def test_other_parameters_end_and_show_an_output_as_they_do_there(
    llm: LLM, conversation: Conversation, params: SamplingParams
) -> None:
    _check_as_generated(llm, conversation, params, list(conversation.generate(sampler=params)))


def test_all_that_fit_may_be_nothing_but_the_room_of_the_sequence() -> None:
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with Executor("toy.gguf", backend="fake", ctx_size=32, parallel=1) as executor, executor.create() as conversation:
        conversation.prompt([1, 2, 3])
        assert len(list(conversation.generate(sampler=endless))) == 29
        assert (conversation.token_count, list(conversation.generate(sampler=endless))) == (32, [])


def test_the_smaller_number_of_tokens_counts(executor: Executor) -> None:
    for given, params, count in ((3, _GREEDY, 3), (60, _GREEDY, 40), (20, replace(_GREEDY, max_tokens=16), 20)):
        with executor.create() as conversation:
            conversation.prompt(_PROMPT)
            assert len(list(conversation.generate(given, params))) == count


def test_a_function_of_the_logits_may_have_stop_strings_and_split_characters(conversation: Conversation) -> None:
    planned = iter("für é end.".encode())

    def write(_logits: NDArray[np.float32]) -> int:
        return next(planned)

    tokens = list(conversation.generate(30, write, stop=" end"))
    assert _text(tokens) == "für é"
    assert [token.text for token in tokens[:4]] == ["f", "", "ü", "r"]
    assert conversation.text == f"{_PROMPT}für é en"


def test_tokens_of_a_begun_stop_string_come_before_the_error() -> None:
    with Executor("toy.gguf", backend="fake", ctx_size=24, parallel=2, kv_layout="unified") as executor:
        filler, conversation = executor.create(), executor.create()
        filler.prompt([1] * 16)
        conversation.prompt([1])
        seen = list[str]()
        tokens = conversation.generate(20, lambda _logits: ord("a"), stop="a" * 20)
        with pytest.raises(caravan.CacheFull):
            seen.extend(token.text for token in tokens)
        assert "".join(seen) == "a" * 8
        assert conversation.tokens == [1, *b"a" * 8]


@pytest.mark.parametrize(
    ("params", "stop", "message"),
    [
        (SamplingParams(n=2), None, "`n` is not known"),
        (SamplingParams(min_tokens=1), None, "`min_tokens` is not known"),
        (SamplingParams(logprobs=1), None, "`logprobs` is not known"),
        (SamplingParams(prompt_logprobs=0), None, "`prompt_logprobs` is not known"),
        (SamplingParams(timeout=1.0), None, "`timeout` is not known"),
        (SamplingParams(priority=1), None, "`priority` is not known"),
        (SamplingParams(use_beam_search=True), None, "`use_beam_search` is not known"),
        (SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), None, "`structured_outputs` is not"),
        (SamplingParams(), "", "`stop`"),
        (SamplingParams(), ["a"] * 65, "`stop`"),
        (SamplingParams(stop_token_ids=[260]), None, "`stop_token_ids`"),
        (SamplingParams(), -1, "`stop_token_ids`"),
        (SamplingParams(), [1.5], "`stop` must be a function, or strings and token ids"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name_before_anything_runs(
    conversation: Conversation, params: SamplingParams, stop: Any, message: str
) -> None:
    with pytest.raises(caravan.RequestError, match=message):
        conversation.generate(5, params, stop)
    assert (conversation.state, conversation.text) == (State.PENDING, _PROMPT)


def test_no_parameter_is_ignored() -> None:
    """Those that are not refused choose a token, or end and show an output."""
    ending = {"stop", "stop_token_ids", "max_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"}
    choosing = {
        "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
        "logit_bias", "typical_p", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length",
        "dry_penalty_last_n", "xtc_probability", "xtc_threshold", "top_n_sigma", "dynatemp_range", "dynatemp_exponent",
        "samplers", "logits_processors",
    }  # fmt: skip
    names = {field.name for field in fields(SamplingParams)}
    assert names - set(executor_sampling._REFUSED) == ending | choosing


async def test_an_asynchronous_generation_ends_at_a_stop_string(whole: str) -> None:
    async with AsyncExecutor("toy.gguf", **_OPTIONS) as executor:
        conversation = await executor.create()
        await conversation.prompt(_PROMPT)
        texts = [token.text async for token in conversation.generate(sampler=_GREEDY, stop=whole[10:14])]
        assert "".join(texts) == whole[: whole.index(whole[10:14])]
        with pytest.raises(caravan.RequestError, match="`n` is not known"):
            await anext(conversation.generate(5, SamplingParams(n=2)))
