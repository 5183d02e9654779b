"""Steering over WebSocket: a running response ends at a token, and a successor goes on from there."""

from typing import Any

import pytest
from aiohttp import ClientWebSocketResponse

from caravan_testing.http_server import serving
from caravan_testing.scripted_engine import EOS_TOKEN, Pause, Step, WordEngine, prompt_text, word
from caravan_testing.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.usefixtures("either_store")

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
WORDS = tuple(f" w{number}" for number in range(50))


async def send(socket: ClientWebSocketResponse, kind: str, **fields: Any) -> None:
    await socket.send_json({"type": f"response.{kind}", **fields})


async def until(socket: ClientWebSocketResponse, *kinds: str) -> list[Any]:
    found: list[Any] = []
    while not found or found[-1]["type"].removeprefix("response.") not in kinds:
        found.append(await socket.receive_json(timeout=DEADLINE_S))
        assert found[-1]["type"] != "error", found
    return found


def first_waits(engine: WordEngine, after: int) -> WordEngine:
    """Let the first stream wait after some words, for ever."""
    steps = list(engine.script(None))  # type: ignore[arg-type]  # it is not read
    first: list[Step] = [*steps[:after], Pause(), *steps[after:]]
    scripts = iter([first])
    engine.script = lambda _: next(scripts, steps)
    return engine


async def begun(socket: ClientWebSocketResponse, deltas: int, **fields: Any) -> str:
    """Begin a response, and return its id after so many deltas."""
    await send(socket, "create", input="Count", **fields)
    [created] = await until(socket, "created")
    for _ in range(deltas):
        await until(socket, "output_text.delta")
    return str(created["response"]["id"])


@pytest.mark.parametrize("store", [True, False])
async def test_a_steered_response_ends_without_another_token_and_its_successor_has_its_tokens(store: bool) -> None:
    """The engine has no next token, so nothing but the steering can end the response."""
    engine = first_waits(WordEngine(words=WORDS), after=3)
    async with serving(engine) as service, service.client.ws_connect(PATH) as socket:
        steered = await begun(socket, 3, store=store, stream_id="a", instructions="Be brief.")
        await send(socket, "steer", previous_response_id=steered, input="Stop")
        events = await until(socket, "incomplete")
        assert events[0]["type"] == "response.steer.accepted"
        assert events[0]["steer"]["previous_response_id"] == steered
        end = events[-1]["response"]
        assert (end["status"], end["incomplete_details"]) == ("incomplete", {"reason": "steered"})
        assert end["output"][0]["content"][0]["text"] == " w0 w1 w2"
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert engine.streams[0].sent == 3, "not one token more"
        whole = (await until(socket, "completed"))[-1]
        assert whole["stream_id"] == "a"
        assert whole["response"]["previous_response_id"] == steered
        assert whole["response"]["instructions"] == "Be brief."
        assert prompt_text(engine) == (
            "[system]Be brief.</s>[user]Count</s>[assistant]<900><901><902></s>[user]Stop</s>[assistant]"
        ), "the tokens that were generated, so that their cells are found"
        await eventually(service.is_idle, "everything released")


async def test_a_response_that_has_no_token_yet_is_steered() -> None:
    engine = first_waits(WordEngine(prompt_computed=1), after=0)
    async with serving(engine) as service, service.client.ws_connect(PATH) as socket:
        steered = await begun(socket, 0)
        await until(socket, "in_progress")
        await eventually(lambda: len(engine.streams), "it was submitted", lambda count: count == 1)
        items = [{"role": "user", "content": [{"type": "input_text", "text": text}]} for text in ("No", "Yes")]
        await send(socket, "steer", previous_response_id=steered, input=items)
        assert (await until(socket, "incomplete"))[-1]["response"]["output"] == []
        await until(socket, "completed")
        assert prompt_text(engine) == "[user]Count</s>[user]No</s>[user]Yes</s>[assistant]"


async def test_input_for_a_response_with_a_call_waits_for_its_result() -> None:
    engine = WordEngine()
    steps: list[Step] = [word(CALL, 300), Pause(), EOS_TOKEN]
    engine.script = lambda _: steps
    async with serving(engine) as service, service.client.ws_connect(PATH) as socket:
        calling = await begun(socket, 0, tools=[TOOL], store=False)
        await until(socket, "function_call_arguments.delta")
        await send(socket, "steer", previous_response_id=calling, input="Quick")
        await until(socket, "steer.accepted")
        engine.resume.set()
        *_, completed, pending = await until(socket, "steer.pending")
        assert completed["type"] == "response.completed"
        [call] = completed["response"]["output"]
        stub = {"type": "function_call_output", "call_id": call["call_id"], "name": "add"}
        assert (pending["reason"], pending["required_input"]) == ("waiting_for_required_input", [stub])
        assert pending["sequence_number"] == completed["sequence_number"] + 1
        engine.script = lambda _: [word("3", 300), EOS_TOKEN]
        await send(socket, "create", previous_response_id=calling, input=[stub | {"output": "1"}], store=False)
        await until(socket, "completed")
        assert "[user]Quick</s>[tool]1</s>" in prompt_text(engine)


async def test_input_that_comes_with_the_end_gets_a_successor() -> None:
    """The last token has come, and its client has not read it."""
    engine = WordEngine()
    async with serving(engine) as service, service.client.ws_connect(PATH) as socket:
        response = await begun(socket, 2)
        await send(socket, "steer", previous_response_id=response, input="More")
        events = await until(socket, "steer.accepted", "steer.failed")
        if events[-1]["type"] == "response.steer.failed":
            assert events[-1]["error"]["code"] == "response_already_completed"
            assert events[-1]["steer"] == {"previous_response_id": response, "input": "More"}
        else:
            await until(socket, "created")


async def refused(socket: ClientWebSocketResponse, target: str, given: Any) -> Any:
    await send(socket, "steer", previous_response_id=target, input=given)
    event = (await until(socket, "steer.failed"))[-1]
    assert event["steer"] == {"previous_response_id": target, "input": given}, "it is returned"
    assert event["error"]["type"] == "invalid_request_error"
    return event["error"]["code"]


@pytest.mark.parametrize(
    "given",
    [
        "",
        [],
        [{"role": "system", "content": "x"}],
        [{"role": "user", "content": "x", "name": "me"}],
        [{"type": "function_call_output", "call_id": "c", "output": "x"}],
        [{"role": "user"}],
    ],
)
async def test_input_that_is_not_a_users_message_is_refused(given: Any) -> None:
    engine = first_waits(WordEngine(words=WORDS), after=1)
    async with serving(engine) as service, service.client.ws_connect(PATH) as socket:
        assert await refused(socket, await begun(socket, 1), given) == "invalid_input"
        assert not engine.streams[0].closed


async def test_responses_that_cannot_be_steered() -> None:
    engine = first_waits(WordEngine(words=WORDS), after=1)
    async with serving(engine) as service, service.client.ws_connect(PATH) as socket:
        assert await refused(socket, "resp_unknown", "x") == "response_not_found"
        conversation = await service.reply("/v1/conversations", {})
        bound = await begun(socket, 1, conversation=conversation["id"])
        assert await refused(socket, bound, "x") == "steering_not_supported"
        engine.resume.set()
        await until(socket, "completed")
        assert await refused(socket, bound, "x") == "response_already_completed"


async def test_input_whose_successor_is_refused_is_returned() -> None:
    engine = first_waits(WordEngine(words=WORDS), after=1)
    async with serving(engine) as service, service.client.ws_connect(PATH) as socket:
        steered = await begun(socket, 1)
        picture = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]
        await send(socket, "steer", previous_response_id=steered, input=picture)
        accepted = (await until(socket, "steer.accepted"))[-1]
        failed = (await until(socket, "steer.failed"))[-1]
        assert failed["error"]["code"] == "successor_creation_failed"
        assert failed["steer"] == {"id": accepted["steer"]["id"], "previous_response_id": steered, "input": picture}


async def test_a_response_that_is_cancelled_returns_its_input() -> None:
    engine = WordEngine()
    engine.script = lambda _: [word(CALL, 300), Pause(), EOS_TOKEN]
    async with serving(engine) as service, service.client.ws_connect(PATH) as socket:
        calling = await begun(socket, 0, tools=[TOOL])
        await until(socket, "function_call_arguments.delta")
        for _ in range(8):
            await send(socket, "steer", previous_response_id=calling, input="x")
            await until(socket, "steer.accepted")
        assert await refused(socket, calling, "x") == "too_many_pending_steers"
        assert (await service.post(f"{PATH}/{calling}/cancel", {})).status == 200
        events = await until(socket, "steer.failed")
        assert events[-1]["error"]["code"] == "response_not_active"
