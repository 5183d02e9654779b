"""The parameters of the package are fields of the HTTP API's bodies."""

import dataclasses

from caravan import ChoiceParameters, SamplingParams
from caravan.client import RespondOptions
from caravan.request_fields import FUNCTIONS, completion_fields
from caravan_router.api.openai.completions.schema import CompletionRequest
from caravan_router.api.openai.responses.schema import ResponseRequest
from caravan_router.api.openai.schema import SamplingFields


def test_a_choice_has_all_parameters_of_sampling() -> None:
    assert ChoiceParameters.__annotations__.keys() == {*SamplingFields.__struct_fields__}
    assert ChoiceParameters.__annotations__.keys() <= {field.name for field in dataclasses.fields(SamplingParams)}


def test_every_parameter_is_a_field_of_a_completion() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    # Functions cannot be sent.
    assert names - FUNCTIONS <= {*CompletionRequest.__struct_fields__}
    assert not FUNCTIONS & {*CompletionRequest.__struct_fields__}


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
