"""Runs in its own environment and prints as JSON what litellm got."""

import asyncio
import json
import os
import sys
from typing import Any

# Without this, importing litellm downloads a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "Describe the sea."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}}]


async def stream_async(common: dict[str, Any]) -> str:
    stream = await litellm.atext_completion(**common, stream=True)
    return "".join([chunk.choices[0].text or "" async for chunk in stream])


def completions(url: str) -> dict[str, object]:
    common = {
        "model": "text-completion-openai/any",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = litellm.text_completion(**common)
    chunks = list(litellm.text_completion(**common, stream=True))
    stopped = litellm.text_completion(**(common | {"prompt": "One, two, three,", "stop": [" six"], "max_tokens": 20}))
    try:
        litellm.text_completion(**(common | {"temperature": -1}), num_retries=0)
        error = None
    except litellm.BadRequestError as refused:
        error = str(refused)
    return {
        "text": whole.choices[0].text,
        "finish": whole.choices[0].finish_reason,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].text or "" for chunk in chunks),
        "streamed_async": asyncio.run(stream_async(common)),
        "stopped": stopped.choices[0].text,
        "error": error,
    }


def overflows(url: str) -> list[bool]:
    """Return whether litellm would ask a model with a longer context instead, for each of the APIs."""
    found = []
    for model, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        common = {"model": f"{model}/any", "api_base": base, "api_key": "none", "num_retries": 0, "max_tokens": 24}
        try:
            litellm.completion(**common, messages=[{"role": "user", "content": "many words " * 20_000}])
            found.append(False)
        except litellm.ContextWindowExceededError:
            found.append(True)
    return found


def chat(url: str) -> dict[str, object]:
    common = {
        "model": "openai/any",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": QUESTION,
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = litellm.completion(**common)
    chunks = list(litellm.completion(**common, stream=True))
    longer = common | {"max_tokens": 80}
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    structured = litellm.completion(**longer, response_format=schema)
    called = litellm.completion(**longer, tools=TOOLS, tool_choice="required")
    return {
        "text": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "structured": json.loads(structured.choices[0].message.content),
        "calls": [
            [call.function.name, json.loads(call.function.arguments)] for call in called.choices[0].message.tool_calls
        ],
    }


def embeddings(url: str) -> list[int]:
    reply = litellm.embedding(
        model="openai/any", input=[PROMPT, "One"], api_base=f"{url}/v1", api_key="none", encoding_format="float"
    )
    return [len(one["embedding"]) for one in reply.data]


def ollama(url: str) -> str:
    """Chat through Ollama's routes."""
    reply = litellm.completion(
        model="ollama_chat/any", api_base=url, messages=QUESTION, max_tokens=24, temperature=0, top_p=1
    )
    return str(reply.choices[0].message.content)


def main(url: str) -> None:
    # Without this, litellm prints advice after an error.
    litellm.suppress_debug_info = True
    got = {
        "completions": completions(url),
        "chat": chat(url),
        "embeddings": embeddings(url),
        "ollama": ollama(url),
        "overflows": overflows(url),
    }
    print(json.dumps(got))


main(sys.argv[1])
