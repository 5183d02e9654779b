"""Runs in its own environment and prints as JSON what the anthropic package got."""

import asyncio
import json
import sys
import time
from typing import Any

import anthropic

QUESTION: Any = [{"role": "user", "content": "Describe the sea."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "weather", "description": "Of a city", "input_schema": SCHEMA}
# The package has no argument for the temperature any more.
COMMON: Any = {"model": "any", "max_tokens": 24, "messages": QUESTION, "extra_body": {"temperature": 0}}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def whole(client: anthropic.Anthropic) -> dict[str, object]:
    message = client.messages.create(**COMMON, system=[{"type": "text", "text": "Be brief."}])
    stopped = client.messages.create(**COMMON, stop_sequences=[" a"])
    counted = client.messages.count_tokens(model="any", messages=QUESTION, system="Be brief.")
    usage = message.usage
    return {
        "text": text_of(message),
        "reason": message.stop_reason,
        "output_tokens": usage.output_tokens,
        "input_tokens": usage.input_tokens + (usage.cache_read_input_tokens or 0),
        "counted": counted.input_tokens,
        "request_id": message._request_id,
        "stopped": [text_of(stopped), stopped.stop_reason, stopped.stop_sequence],
    }


def streamed(client: anthropic.Anthropic) -> dict[str, object]:
    with client.messages.stream(**COMMON, system="Be brief.") as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    kinds = [event.type for event in client.messages.create(**COMMON, stream=True)]
    return {"texts": texts, "text": text_of(final), "tokens": final.usage.output_tokens, "kinds": kinds}


def called(client: anthropic.Anthropic) -> dict[str, object]:
    common = COMMON | {"max_tokens": 100, "tools": [TOOL], "tool_choice": {"type": "any"}}
    message = client.messages.create(**common)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    with client.messages.stream(**common) as stream:
        final = stream.get_final_message()
    (again,) = [block for block in final.content if block.type == "tool_use"]
    turns = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}]},
    ]
    answer = client.messages.create(**COMMON | {"messages": turns, "tools": [TOOL]})
    return {
        "name": call.name,
        "input": call.input,
        "streamed": again.input,
        "reason": message.stop_reason,
        "answered": len(answer.content),
    }


def run(client: anthropic.Anthropic) -> list[list[str]]:
    """Let the package run a tool. Its requests have a ``thread`` until it is told to send all messages."""

    def weather(city: str) -> str:
        return f"Sunny in {city}."

    tool = anthropic.beta_tool(weather, description="Of a city", input_schema=SCHEMA)
    common = COMMON | {"max_tokens": 100, "tool_choice": {"type": "any"}}
    runner = client.beta.messages.tool_runner(**common, tools=[tool], max_iterations=2)
    return [[block.type for block in message.content] for message in runner]


def models(url: str) -> list[str]:
    """List the models as the package does if it checks every field of a reply."""
    with anthropic.Anthropic(base_url=url, api_key="none", _strict_response_validation=True) as client:
        return [model.lifecycle for model in client.models.list()]


def errors(client: anthropic.Anthropic) -> list[str]:
    got = []
    wrong: list[dict[str, Any]] = [{"extra_body": {"temperature": -1}}, {"messages": []}]
    for fields in wrong:
        try:
            client.messages.create(**COMMON | fields)
        except anthropic.BadRequestError as error:
            got.append(str(error.body))
    return got


def batched(client: anthropic.Anthropic) -> dict[str, object]:
    """Let a batch of messages be answered, and cancel another one."""
    params: Any = {name: value for name, value in COMMON.items() if name != "extra_body"}
    requests: Any = [
        {"custom_id": "good", "params": params},
        {"custom_id": "bad", "params": params | {"messages": []}},
    ]
    batch = client.messages.batches.create(requests=requests)
    while (now := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        time.sleep(0.1)
    results = {one.custom_id: one.result.type for one in client.messages.batches.results(batch.id)}
    long: Any = [{"custom_id": str(number), "params": params | {"max_tokens": 500}} for number in range(100)]
    cancelled = client.messages.batches.cancel(client.messages.batches.create(requests=long).id)
    while client.messages.batches.retrieve(cancelled.id).processing_status != "ended":
        time.sleep(0.1)
    listed = [one.id for one in client.messages.batches.list(limit=1)]
    counts = now.request_counts
    return {
        "results": results,
        "counts": [counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired],
        "cancelled": cancelled.processing_status,
        "listed": listed[:2] == [cancelled.id, batch.id],
        "deleted": client.messages.batches.delete(batch.id).type,
    }


async def asynchronous(url: str) -> str:
    async with anthropic.AsyncAnthropic(base_url=url, auth_token="any") as client:
        return text_of(await client.messages.create(**COMMON))


def main(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        got = {
            "whole": whole(client),
            "streamed": streamed(client),
            "called": called(client),
            "run": run(client),
            "models": models(url),
            "errors": errors(client),
            "batched": batched(client),
            "asynchronous": asyncio.run(asynchronous(url)),
        }
    print(json.dumps(got))


if __name__ == "__main__":
    main(*sys.argv[1:])
