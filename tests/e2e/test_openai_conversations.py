"""openai-python's responses and conversations against a real server: forks, restarts, tools, whole histories."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

from caravan_models.contents import SeenFile, SeenFiles
from caravan_testing.serve_process import MODEL, Served, serve
from caravan_testing.shard_models import WORDS_MODEL, fetched
from caravan_testing.waiting import DEADLINE_S

pytestmark = [pytest.mark.e2e, pytest.mark.model]

# Computing has a price there, too, so that what is cached is worth fetching.
TOY = ("--backend", "fake", "--fake-token-ms", "0.1", "-np", "4", "-c", "8192")
DEMO = ("-np", "4", "-c", "8192", "-t", "1")


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    """A server with a model of llama.cpp, of random weights."""
    with serve("-np", "4", "-c", "8192", "-t", "1", models=(fetched(WORDS_MODEL),)) as running:
        yield running


@pytest.fixture(params=["toy", "tiny", pytest.param("served", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as made:
        yield made


def respond(client: OpenAI, conversation: str, text: str) -> tuple[int, int]:
    """Generate a few tokens, always the same ones. Return the number of cached tokens and of all tokens."""
    response = client.responses.create(
        model="any", input=text, conversation=conversation, max_output_tokens=10, temperature=0
    )
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens, response.usage.total_tokens


def test_a_conversation_is_what_openai_python_expects(client: OpenAI) -> None:
    items: Any = [{"type": "message", "role": "user", "content": "Hello"}]
    conversation = client.conversations.create(items=items, metadata={"topic": "sea"})
    assert conversation.metadata == {"topic": "sea"}
    assert client.conversations.retrieve(conversation.id) == conversation
    updated = client.conversations.update(conversation.id, metadata={"topic": "land"})
    assert updated.metadata == {"topic": "land"}
    added = client.conversations.items.create(conversation.id, items=items * 2)
    assert len(added.data) == 2
    listed = list(client.conversations.items.list(conversation.id, limit=2, order="asc"))
    assert len(listed) == 3, "both pages"
    first = client.conversations.items.retrieve(listed[0].id or "", conversation_id=conversation.id)
    assert first == listed[0]
    left = client.conversations.items.delete(listed[0].id or "", conversation_id=conversation.id)
    assert left.id == conversation.id
    assert len(list(client.conversations.items.list(conversation.id))) == 2
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_both_branches_of_a_fork_compute_new_tokens_only(client: OpenAI, server: Served) -> None:
    """The last token of an output is never computed, so that it counts as new."""
    conversation = client.conversations.create().id
    known = 0
    for number in range(3):
        cached, total = respond(client, conversation, f"Tell me about the number {number}.")
        assert cached >= known - 1
        known = total
    fork = post(server, f"/v1/conversations/{conversation}/fork", {})["id"]
    for branch in (conversation, fork):
        cached, _ = respond(client, branch, f"And about {branch[5:9]}?")
        assert cached >= known - 1


@pytest.mark.parametrize("flags", [TOY, pytest.param(DEMO, marks=pytest.mark.clients)], ids=["toy model", "demo model"])
@pytest.mark.parametrize("layout", ["split", pytest.param("unified", marks=pytest.mark.slow)])
def test_turns_continue_where_they_were_after_a_restart(flags: tuple[str, ...], layout: str, tmp_path: Path) -> None:
    if flags == DEMO:
        # What is saved belongs to the model's digest, which a server computes when nothing else runs.
        SeenFiles(model=(SeenFile.at(MODEL),)).read()
    cache = ("--cache-dir", str(tmp_path / "cache"), "--kv-layout", layout)
    kept = ("--state-file", str(tmp_path / "state"), *cache)
    with serve(*flags, *kept) as served, OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        conversation = client.conversations.create().id
        respond(client, conversation, "Tell me about the sea, which is large and blue and full of fish.")
        _, known = respond(client, conversation, "And about the land.")
    with serve(*flags, *kept) as served, OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        assert len(list(client.conversations.items.list(conversation))) == 4
        cached, _ = respond(client, conversation, "And about the sky.")
        assert cached >= known - 1


@pytest.mark.parametrize("server", ["toy", pytest.param("served", marks=pytest.mark.clients)], indirect=True)
def test_codex_is_understood_turn_by_turn(server: Served) -> None:
    """Its requests have the whole history. It reads whole items, and the id and usage at the end."""
    requests = json.loads((Path(__file__).parent / "codex_requests.json").read_text())
    prompt_before = 0
    for body in requests:
        events = stream(server, body | {"max_output_tokens": 12})
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] in {"response.completed", "response.incomplete"}
        response = events[-1]["response"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == response["output"]
        assert done
        usage = response["usage"]
        # What came before the assistant's turn is the same as in the request before.
        assert usage["input_tokens_details"]["cached_tokens"] >= prompt_before - 30
        prompt_before = usage["input_tokens"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{server.url}/v1/responses/{response['id']}", timeout=DEADLINE_S)


def post(server: Served, path: str, body: Any) -> Any:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def stream(server: Served, body: Any) -> list[Any]:
    request = urllib.request.Request(
        f"{server.url}/v1/responses", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        lines = response.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


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
        client.responses.create(model="any", input="x", background=True, store=False)
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
