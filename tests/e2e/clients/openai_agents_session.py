"""Runs in its own environment and prints as JSON what openai-agents got: a loop with a tool, sessions, streams."""

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

# A weak model may ramble on, and a run whose answer is cut off fails: the schema lets each answer end.
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 60}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}
SETTINGS = ModelSettings(temperature=0, max_tokens=400, extra_body={"text": {"format": FORMAT}})
CALLING = ModelSettings(temperature=0, max_tokens=120, tool_choice="required", parallel_tool_calls=False)


async def main(url: str) -> dict[str, Any]:
    set_tracing_disabled(disabled=True)
    called: list[int] = []

    def double(number: int) -> str:
        """Doubles a number from 0 to 99."""
        called.append(number)
        return str(2 * number)

    # It is offered once: a weak model would call it again and again.
    tool = function_tool(double, is_enabled=lambda _context, _agent: not called)

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = OpenAIResponsesModel(model="any", openai_client=client)
        plain = Agent(name="plain", instructions="Be brief.", model=model, model_settings=SETTINGS)
        caller = Agent(name="caller", model=model, model_settings=CALLING, tools=[tool])
        looped = await Runner.run(caller, "Double 21.", max_turns=5)
        streaming = Runner.run_streamed(plain, "What is the capital of France?")
        deltas = [
            event.data.delta
            async for event in streaming.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        session = OpenAIConversationsSession(openai_client=client)
        for question in ("Name a colour.", "Another one."):
            await Runner.run(plain, question, session=session)
        chained = await Runner.run(plain, "Name a colour.")
        continued = await Runner.run(plain, "Another one.", previous_response_id=chained.last_response_id)
        return {
            "called": called,
            "kinds": [item.type for item in looped.new_items],
            "final": looped.final_output,
            "streamed": "".join(deltas),
            "whole": streaming.final_output,
            "session": [item["role"] for item in await session.get_items()],
            "popped": (await session.pop_item() or {}).get("role"),
            "left": len(await session.get_items()),
            "cached": continued.raw_responses[0].usage.input_tokens_details.cached_tokens,
            "requests": continued.context_wrapper.usage.requests,
        }


print(json.dumps(asyncio.run(main(sys.argv[1]))))
