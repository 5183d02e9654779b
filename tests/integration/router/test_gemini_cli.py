"""Requests in the form in which Gemini CLI 0.61 sends them, replayed in order against the toy model."""

import json
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_dialects.api.limits import Limits
from caravan_testing.cluster import ClusterConfig, cluster

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# </think> #}"
)
HEADERS = {"x-goog-api-client": "google-genai-sdk/1.30.0 gl-node/v20.20.2", "x-goog-api-key": "any"}
FUNCTIONS = [
    {
        "name": name,
        "description": description,
        "parametersJsonSchema": {
            "type": "object",
            "properties": {
                field: {"type": "string", "description": f"The {field}"},
                "wait_for_previous": {"type": "boolean"},
            },
            "required": [field],
        },
    }
    for name, description, field in (
        ("update_topic", "Manages your narrative flow.", "title"),
        ("list_directory", "Lists files and folders.", "dir_path"),
    )
]
CONTEXT = "<session_context>\nThis is the Gemini CLI. We are setting up the context for our chat.\n</session_context>"
FIRST: list[dict[str, Any]] = [{"parts": [{"text": CONTEXT}, {"text": "List the files."}], "role": "user"}]
SECOND: list[dict[str, Any]] = [
    *FIRST,
    {
        "role": "model",
        "parts": [
            {"text": "I list them.", "thought": True},
            {"text": "I will look."},
            {
                "functionCall": {"id": "call_01", "name": "list_directory", "args": {"dir_path": "."}},
                "thoughtSignature": "skip_thought_signature_validator",
            },
        ],
    },
    {
        "role": "user",
        "parts": [
            {"functionResponse": {"id": "call_01", "name": "list_directory", "response": {"output": "README.md"}}}
        ],
    },
]


def turn(contents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the body of a request. Its sampling is that of Gemini's models."""
    return {
        "contents": contents,
        "systemInstruction": {"parts": [{"text": "You are Gemini CLI, an autonomous CLI agent."}]},
        "tools": [{"functionDeclarations": FUNCTIONS}],
        "generationConfig": {"temperature": 1, "topP": 0.95, "topK": 64, "thinkingConfig": {"includeThoughts": True}},
    }


@pytest.mark.usefixtures("copies_cost_as_guessed")
async def test_a_session_of_gemini_cli() -> None:
    limits = Limits(max_total_tokens=1024, reasoning_budget=40)
    # What is cached is worth its copy.
    config = ClusterConfig(chat_template=TEMPLATE, cells=16384, limits=limits, step_s=0.001, token_s=0.0002)
    async with (
        cluster(config) as running,
        ClientSession(running.url, headers=HEADERS) as client,
    ):
        first = await chunks_of(client, turn(FIRST))
        second = await chunks_of(client, turn(SECOND))
        prompt, usage = first[-1]["usageMetadata"]["promptTokenCount"], second[-1]["usageMetadata"]
        # All but the end of the first prompt is found again.
        assert usage["cachedContentTokenCount"] > prompt - 30
        assert usage["promptTokenCount"] > prompt


async def chunks_of(client: ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a stream that Gemini CLI takes for a good one."""
    async with client.post("/v1beta/models/gemini-3-pro:streamGenerateContent?alt=sse", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        assert "X-Caravan-Ignored" not in response.headers
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert all(chunk["candidates"][0]["content"]["parts"] for chunk in chunks)
    assert ["finishReason" in chunk["candidates"][0] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return chunks
