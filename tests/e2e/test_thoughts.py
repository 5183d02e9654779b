"""Thoughts of the demo model, whose file gets a chat template that opens them: apart from the answer, and bounded."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from caravan_testing.serve_process import MODEL, Served, serve

pytestmark = pytest.mark.e2e

# Splits old thoughts off and opens new ones, as the templates of DeepSeek-R1 do.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": "Name a city."}],
    "max_tokens": 120,
    "temperature": 0,
    "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tmp_path_factory.mktemp("model") / "thinking.gguf"
    command = [
        sys.executable,
        "-m",
        "gguf.scripts.gguf_new_metadata",
        "--chat-template",
        TEMPLATE,
        str(MODEL),
        str(model),
    ]
    subprocess.run(command, check=True, capture_output=True)
    with serve("-np", "4", "-c", "8192", "-t", "1", "--kv-layout", "split", models=[model]) as running:
        yield running


@pytest.mark.parametrize("budget", [1, 20])
def test_a_budget_ends_a_thought_and_the_schema_follows(thinking: Served, budget: int) -> None:
    extra: dict[str, Any] = {"extra_body": {"reasoning_budget_tokens": budget}}
    with OpenAI(base_url=f"{thinking.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**ASKED, **extra)
        chunks = list(client.chat.completions.create(**ASKED, **extra, stream=True))
    message, usage = whole.choices[0].message, whole.usage
    assert message.content is not None
    assert set(json.loads(message.content)) == {"city"}
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == budget
    thought = getattr(message, "reasoning_content", "")
    assert "</think>" not in thought
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == thought


def test_a_switched_off_thought_leaves_the_answer_alone(thinking: Served) -> None:
    with OpenAI(base_url=f"{thinking.url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(**ASKED, reasoning_effort="none")
    message = reply.choices[0].message
    assert message.content is not None
    assert set(json.loads(message.content)) == {"city"}
    assert getattr(message, "reasoning_content", None) is None
