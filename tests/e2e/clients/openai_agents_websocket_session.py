"""Runs in its own environment and prints as JSON what openai-python got over WebSocket: turns, lanes, steering."""

import json
import sys
from typing import Any

from openai import OpenAI


def until(connection: Any, *kinds: str) -> list[Any]:
    """Return the events up to the first of one of these types."""
    found: list[Any] = []
    while not found or found[-1].type not in kinds:
        found.append(connection.recv())
    return found


def user(text: str) -> Any:
    return [{"type": "message", "role": "user", "content": text}]


def main(url: str) -> dict[str, Any]:
    got: dict[str, Any] = {}
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client, client.responses.connect() as connection:

        def answered(**fields: Any) -> Any:
            connection.response.create(model="any", store=False, temperature=0, max_output_tokens=12, **fields)
            return until(connection, "response.completed", "response.incomplete")[-1].response

        first = answered(input=user("Count to a hundred."))
        got["text"] = first.output_text
        second = answered(input=user("And back."), previous_response_id=first.id)
        got["second"] = [second.previous_response_id == first.id, second.usage.input_tokens_details.cached_tokens]
        got["before"] = first.usage.total_tokens
        lanes = ["a", "b"]
        for lane in lanes:
            connection.response.create(
                model="any",
                store=False,
                stream_id=lane,
                input=user(lane),
                previous_response_id=first.id,
                max_output_tokens=5,
            )
        ended: list[str] = []
        while len(ended) < len(lanes):
            event = until(connection, "response.completed", "response.incomplete")[-1]
            ended.append(event.stream_id)
        got["lanes"] = sorted(ended)

        connection.response.create(
            model="any", store=False, temperature=0, input=user("Tell a long story."), max_output_tokens=2000
        )
        started = until(connection, "response.created")[-1].response
        for _ in range(5):
            until(connection, "response.output_text.delta")
        connection.response.steer(previous_response_id=started.id, input="Stop and say hello.")
        events = until(connection, "response.incomplete")
        got["accepted"] = [event.steer.previous_response_id for event in events if "steer.accepted" in event.type]
        steered = events[-1].response
        got["steered"] = [started.id == got["accepted"][0], steered.incomplete_details.reason]
        got["tokens"] = steered.usage.total_tokens
        successor = until(connection, "response.created")[-1].response
        until(connection, "response.output_text.delta")
        connection.response.steer(previous_response_id=successor.id, input=[user("Enough.")[0]])
        again = until(connection, "response.incomplete")[-1].response
        got["twice"] = [again.incomplete_details.reason, again.usage.input_tokens_details.cached_tokens]
        connection.response.create(model="any", input="x", previous_response_id="resp_unknown")
        got["error"] = until(connection, "error")[-1].error.code
    return got


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(main(sys.argv[1]))}\n")
