"""openai-python's responses against a real server, with the demo model and with the toy model."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

if TYPE_CHECKING:
    from caravan_testing.serve_process import Served

pytestmark = pytest.mark.e2e

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class City(BaseModel):
    """Its texts have few values: a weak model writes long ones."""

    size: Literal["small", "large"]
    coast: bool


@pytest.fixture(params=["demo model", "toy model"])
def client(request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    served: Served = request.getfixturevalue("served" if request.param == "demo model" else "toy")
    with OpenAI(base_url=f"{served.url}/v1", api_key="none") as made:
        yield made


def test_a_response_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    body: Any = {"model": "any", "input": "Describe the sea.", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**body)
    assert whole.status in {"completed", "incomplete"}
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 16
    events = list(client.responses.create(**body, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(**body) as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "response.created"
        assert kinds[-1] == f"response.{whole.status}"
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    [item] = client.responses.input_items.list(whole.id).data
    assert item.type == "message"
    client.responses.delete(whole.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(whole.id)


def test_a_response_keeps_to_a_type(client: OpenAI) -> None:
    parsed = client.responses.parse(
        model="any", input="Describe Paris.", text_format=City, max_output_tokens=400, extra_body={"seed": 3}
    )
    assert isinstance(parsed.output_parsed, City)
    format_: Any = {"type": "json_schema", "name": "answer", "schema": {"enum": ["yes", "no"]}, "strict": True}
    with client.responses.stream(model="any", input="Yes or no?", text={"format": format_}) as stream:
        assert json.loads(stream.get_final_response().output_text) in {"yes", "no"}


def test_a_tool_is_called_and_its_output_answered(client: OpenAI) -> None:
    with client.responses.stream(
        model="any", input="What is the weather in Paris?", tools=[WEATHER], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=200,
    ) as stream:  # fmt: skip
        response = stream.get_final_response()
    [call] = response.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city"}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answered = client.responses.create(
        model="any", input=[output], previous_response_id=response.id, tools=[WEATHER], tool_choice="none",
        max_output_tokens=8,
    )  # fmt: skip
    assert answered.usage is not None
    assert answered.output[0].type == "message"


def test_a_tool_of_a_namespace_is_called_by_its_bare_name(client: OpenAI) -> None:
    namespace: Any = {"type": "namespace", "name": "mcp__demo", "description": "Of a server", "tools": [WEATHER]}
    body: Any = {"model": "any", "input": "The weather in Paris?", "tools": [namespace], "tool_choice": "required"}
    response = client.responses.create(**body, parallel_tool_calls=False, max_output_tokens=200)
    [call] = response.output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("mcp__demo", "weather")
    assert set(json.loads(call.arguments)) == {"city"}


def test_refusals_name_the_field(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="background"):
        client.responses.create(model="any", input="x", background=True)
    with pytest.raises(NotFoundError):
        client.responses.create(model="any", input="x", previous_response_id="resp_0")
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="any", input="x " * 40_000)
    assert caught.value.code == "context_length_exceeded"


def test_ten_turns_compute_new_tokens_only(client: OpenAI) -> None:
    """The last token of an output is never computed, so that it counts as new."""
    previous, known = None, 0
    for number in range(10):
        response = client.responses.create(
            model="any", input=f"Tell me more about {number}.", previous_response_id=previous, max_output_tokens=12,
            temperature=0,
        )  # fmt: skip
        assert response.usage is not None
        if previous is not None:
            assert response.usage.input_tokens_details.cached_tokens >= known - 1, number
        previous, known = response.id, response.usage.total_tokens
