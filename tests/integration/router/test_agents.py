"""Requests as Claude Code and Gemini CLI 0.61 send them, replayed in order against the toy model."""

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
EPHEMERAL = {"type": "ephemeral"}
HEADERS = {
    "x-api-key": "any",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.197 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
}
TOOLS = [
    {
        "name": name,
        "description": description,
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {field: {"type": "string", "description": f"The {field}"}},
            "required": [field],
            "additionalProperties": False,
        },
    }
    for name, description, field in (
        ("Bash", "Executes a given bash command.", "command"),
        ("Read", "Reads a file from the local filesystem.", "file_path"),
        ("mcp__files__search", "Searches files.", "pattern"),
    )
]


def system(number: int) -> list[dict[str, Any]]:
    """Return the system prompt of request ``number``: the first block changes each time."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=cli; cch={number:05x};"
    return [
        {"type": "text", "text": billing},
        {"type": "text", "text": "You are Claude Code, a CLI.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "You help with software.\n\n# Tone\nBe brief.", "cache_control": EPHEMERAL},
    ]


def turn(number: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the body of the main loop's request ``number``."""
    return {
        "model": "claude-sonnet-4-5-20250929",
        "messages": messages,
        "system": system(number),
        "tools": TOOLS,
        "metadata": {"user_id": "user_0_account__session_1"},
        "max_tokens": 32000,
        "thinking": {"type": "enabled", "budget_tokens": 40},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


REMINDER = "<system-reminder>\nAs you answer, you can use the following context.\n</system-reminder>"
FIRST: dict[str, Any] = {
    "role": "user",
    "content": [
        {"type": "text", "text": REMINDER},
        {"type": "text", "text": "List the files.", "cache_control": EPHEMERAL},
    ],
}
AGENTS: dict[str, Any] = {"role": "system", "content": "Available agent types for the Agent tool:\n- claude: Any task."}
SECOND: list[dict[str, Any]] = [
    FIRST,
    AGENTS,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I list them.", "signature": "0123"},
            {"type": "text", "text": "I will look."},
            {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_01",
                "content": "README.md",
                "is_error": False,
                "cache_control": EPHEMERAL,
            }
        ],
    },
    {"role": "system", "content": "The user has opened README.md."},
]


@pytest.mark.usefixtures("copies_cost_as_guessed")
async def test_a_session_of_claude_code() -> None:
    limits = Limits(max_total_tokens=4096)
    # What is cached is worth its copy.
    config = ClusterConfig(chat_template=TEMPLATE, cells=16384, limits=limits, step_s=0.001, token_s=0.0002)
    async with cluster(config) as running, ClientSession(running.url, headers=HEADERS) as client:
        assert (await client.head("/")).status == 200
        # It asks whether the key has a quota left.
        quota = {"model": "claude-haiku-4-5", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
        async with client.post("/v1/messages?beta=true", json=quota) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["usage"]["output_tokens"] == 1
        count = {"model": "claude-sonnet-4-5", "messages": [FIRST], "tools": TOOLS}
        async with client.post("/v1/messages/count_tokens?beta=true", json=count) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["input_tokens"] > 100
        first = await events_of(client, turn(1, [FIRST, AGENTS]))
        prompt_tokens = first[0]["message"]["usage"]["input_tokens"]
        second = await events_of(client, turn(2, SECOND))
        usage = second[-2]["usage"]
        # All but the end of the first prompt is found again, although the billing line has changed.
        assert usage["cache_read_input_tokens"] > prompt_tokens - 30
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] > prompt_tokens


async def events_of(client: ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, which must be in order."""
    async with client.post("/v1/messages?beta=true", json=body) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    events: list[dict[str, Any]] = [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")
    ]
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") >= 1
    thinking = next(event for event in events if event["type"] == "content_block_start")["content_block"]
    assert thinking["type"] == "thinking"
    return events


GEMINI_HEADERS = {"x-goog-api-client": "google-genai-sdk/1.30.0 gl-node/v20.20.2", "x-goog-api-key": "any"}
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
GEMINI_FIRST: list[dict[str, Any]] = [{"parts": [{"text": CONTEXT}, {"text": "List the files."}], "role": "user"}]
GEMINI_SECOND: list[dict[str, Any]] = [
    *GEMINI_FIRST,
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


def gemini_turn(contents: list[dict[str, Any]]) -> dict[str, Any]:
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
    config = ClusterConfig(chat_template=TEMPLATE, cells=16384, limits=limits, step_s=0.001, token_s=0.0002)
    async with (
        cluster(config) as running,
        ClientSession(running.url, headers=GEMINI_HEADERS) as client,
    ):
        first = await chunks_of(client, gemini_turn(GEMINI_FIRST))
        second = await chunks_of(client, gemini_turn(GEMINI_SECOND))
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
