"""Parameters are checked when they are made, as far as that needs no model."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from caravan import ModelOptions, RequestError, SamplingParams, StructuredOutputsParams
from caravan.options import check_names


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "`temperature` must be strictly positive. Given: -1"),
        ({"temperature": "1"}, "`temperature`: expected `float | None`, got `str`"),
        ({"top_p": 0}, "`top_p` must be > 0.0 and <= 1.0. Given: 0"),
        ({"n": 0}, "`n` must be > 0 and <= 256. Given: 0"),
        ({"n": 2, "best_of": 1}, "`best_of` must be >= `n`"),
        ({"max_tokens": 0}, "`max_tokens` must be a whole number >= 1, or None. Given: 0"),
        ({"max_tokens": "5"}, "`max_tokens` must be a whole number >= 1, or None. Given: '5'"),
        ({"max_tokens": 4, "min_tokens": 5}, "`min_tokens` must be >= 0 and <= 4. Given: 5"),
        ({"logprobs": -1}, "`logprobs` must be >= 0"),
        ({"logprobs": True}, "`logprobs`: expected `int | None`, got `bool`"),
        ({"stop": 5}, "`stop`: expected `str | list | None`, got `int`"),
        ({"stop": [""]}, "`stop` must not contain empty strings"),
        ({"samplers": ["dice"]}, "`samplers` must be among"),
        ({"logit_bias": [1]}, "`logit_bias` must be an object of biases by token id. Given: [1]"),
        ({"choice_parameters": [5]}, "`choice_parameters` must be objects. Given: 5"),
        ({"choice_parameters": [{"temperature": -1}]}, "`choice_parameters[0].temperature` must be strictly positive"),
        ({"choice_parameters": [{}], "n": 2}, "`choice_parameters` must have"),
        ({"logits_processors": 5}, "`logits_processors` must be a list of functions. Given: 5"),
        ({"logits_processors": [5]}, "`logits_processors` must be functions. Given: 5"),
        ({"structured_outputs": {"regex": "a"}}, "`structured_outputs` must be StructuredOutputsParams"),
        (
            {"structured_outputs": StructuredOutputsParams(regex="a", choice=["b"])},
            "`structured_outputs.regex` and `structured_outputs.choice` cannot be used together",
        ),
    ],
)
def test_a_value_that_no_model_allows_is_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**fields)
    assert message in str(refused.value)
    with pytest.raises(RequestError):
        replace(SamplingParams(), **fields)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("repeat_penalty", "repetition_penalty")],
)
def test_a_field_of_another_name_is_answered_with_ours(name: str, meant: str) -> None:
    wrong: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=rf"unknown options: {name} \(did you mean {meant}\?\)"):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["n_ctx"], "n_ctx (did you mean ctx_size?)"),
        (["max_model_len", "paralel"], "max_model_len (did you mean ctx_size?), paralel (did you mean parallel?)"),
        (["quux"], "unknown options: quux"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(names: list[str], message: str) -> None:
    with pytest.raises(TypeError) as refused:
        check_names(names, ModelOptions.__annotations__)
    assert str(refused.value).endswith(message)


def test_parameters_show_what_is_set() -> None:
    params = SamplingParams(temperature=0, stop=["a"], structured_outputs=StructuredOutputsParams(regex="b"))
    shown = "SamplingParams(temperature=0, stop=['a'], structured_outputs=StructuredOutputsParams(regex='b'))"
    assert repr(params) == shown
    assert repr(SamplingParams()) == "SamplingParams()"
    assert pickle.loads(pickle.dumps(params)) == params
