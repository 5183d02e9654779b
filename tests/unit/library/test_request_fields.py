"""The parameters of the package are fields of the HTTP API's bodies."""

import dataclasses

import msgspec
import pytest

from caravan import ChoiceParameters, SamplingParams
from caravan.client import RespondOptions
from caravan.errors import RequestError
from caravan.request_bodies import chat_body
from caravan.request_fields import FUNCTIONS, completion_fields
from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.reading import BodyReader
from caravan_dialects.api.openai.completions.schema import CompletionRequest
from caravan_dialects.api.openai.responses.schema import ResponseRequest
from caravan_dialects.api.openai.schema import SamplingFields


def test_a_choice_has_all_parameters_of_sampling() -> None:
    assert ChoiceParameters.__annotations__.keys() == {*SamplingFields.__struct_fields__}
    assert ChoiceParameters.__annotations__.keys() <= {field.name for field in dataclasses.fields(SamplingParams)}


def test_every_parameter_is_a_field_of_a_completion() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    # Functions cannot be sent: a server refuses the fields of their names.
    assert names - FUNCTIONS <= {*CompletionRequest.__struct_fields__}
    for name in FUNCTIONS:
        with pytest.raises(ValidationError, match=f"`{name}` is not supported"):
            BodyReader(CompletionRequest).read(msgspec.json.encode({"prompt": "p", name: ["f"]}))


def test_the_options_of_a_response_are_fields_of_its_body() -> None:
    renamed = {"schema", "reasoning_effort"}
    assert RespondOptions.__annotations__.keys() - renamed <= {*ResponseRequest.__struct_fields__}


def test_only_what_is_not_at_its_default_is_sent() -> None:
    fields = completion_fields("p", SamplingParams(top_k=3, stop=("a", "b"), logit_bias={7: 1.0}))
    assert {name: value for name, value in fields.items() if value is not None} == {
        "prompt": "p", "max_tokens": 16, "top_k": 3, "stop": ["a", "b"], "logit_bias": {"7": 1.0}
    }  # fmt: skip


def test_choice_parameters_say_how_many_outputs_there_are() -> None:
    choices: list[ChoiceParameters] = [{}, {"temperature": 0.5}]
    assert completion_fields("p", SamplingParams(choice_parameters=choices))["n"] == 2
    assert completion_fields("p", SamplingParams(choice_parameters=choices, n=3))["n"] == 3


def test_fields_of_a_chat_mean_what_they_mean_to_a_server() -> None:
    messages = [{"role": "user", "content": "hi"}]
    options = {"thinking": {"type": "disabled"}, "repeat_penalty": 1.5, "max_completion_tokens": -1}
    body = chat_body(messages, SamplingParams(max_tokens=None), options)
    assert (body.reasoning_effort, body.repetition_penalty, body.max_completion_tokens) == ("none", 1.5, None)
    for refused in ({"functions": [{"name": "f"}]}, {"frobnicate": 1}):
        [name] = refused
        with pytest.raises(RequestError, match=name):
            chat_body(messages, SamplingParams(), refused)
