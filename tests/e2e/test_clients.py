"""Client libraries against a real server, used as their users use them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError
from openai import BadRequestError, OpenAI

from caravan_testing.serve_process import ROOT, Served

pytestmark = pytest.mark.e2e

PROMPT = "The capital of France is"
QUESTION, ANSWER = "Describe the sea.", "The sea is a vast"
CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TEXT_GENERATION_PYTHON = ROOT / ".cache/clients/text-generation/bin/python"


def test_the_printed_curl_line_streams_sensible_text(served: Served) -> None:
    (line,) = (line for line in served.log if line.startswith("  curl"))
    answer = subprocess.run(line, shell=True, capture_output=True, text=True, check=True, timeout=600).stdout
    events = [json.loads(event) for event in re.findall(r"^data: (.*)$", answer, re.MULTILINE)]
    assert len(events) == 30
    assert "Paris" in events[-1]["generated_text"]
    assert "".join(event["token"]["text"] for event in events) == events[-1]["generated_text"]


def test_huggingface_hub_generates_whole_and_streamed_text(served: Served) -> None:
    client = InferenceClient(served.url)
    plain = client.text_generation(PROMPT, max_new_tokens=12)
    assert plain.startswith(" Paris")
    detailed = client.text_generation(PROMPT, max_new_tokens=12, details=True)
    assert detailed.generated_text == plain
    assert detailed.details is not None
    assert detailed.details.generated_tokens == 12
    assert all(token.logprob <= 0 for token in detailed.details.tokens)
    streamed = list(client.text_generation(PROMPT, max_new_tokens=12, stream=True, details=True))
    assert "".join(event.token.text for event in streamed) == plain
    assert streamed[-1].details is not None
    assert streamed[-1].details.finish_reason == "length"


def test_huggingface_hub_sees_a_validation_error(served: Served) -> None:
    with pytest.raises((HfHubHTTPError, ValidationError)):
        InferenceClient(served.url).text_generation(PROMPT, max_new_tokens=10**6)


def test_openai_completions_are_whole_or_streamed(served: Served) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        whole = client.completions.create(model="any", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2)
        assert whole.choices[0].text.startswith(" Paris")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.tokens or []) == 12
        stream = client.completions.create(
            model="any",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12


def test_openai_completions_with_several_prompts_and_stop(served: Served) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        answer = client.completions.create(
            model="any", prompt=[PROMPT, "One, two, three,"], max_tokens=20, temperature=0, stop=["\n", " six"]
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[1].text == " four, five,"
        assert answer.choices[1].finish_reason == "stop"
        # Few tokens, for the reason that clients/text_generation_session.py gives.
        seeded = [
            client.completions.create(model="any", prompt=PROMPT, max_tokens=4, temperature=0.9, seed=11)
            .choices[0]
            .text
            for _ in range(2)
        ]
        assert seeded[0] == seeded[1]
        with pytest.raises(BadRequestError, match="best_of"):
            client.completions.create(model="any", prompt=PROMPT, n=3, best_of=2)


def test_tgis_own_client_generates_streams_and_chats(served: Served) -> None:
    """The client needs its own environment, which `make test` creates."""
    assert TEXT_GENERATION_PYTHON.exists(), "no environment for this client: run `make test`"
    script = Path(__file__).parent / "clients/text_generation_session.py"
    run = subprocess.run(
        [TEXT_GENERATION_PYTHON, script, served.url], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    got = json.loads(run.stdout)
    assert got["text"].startswith(" Paris")
    assert got["tokens"] == 12
    assert got["finish"] == "length"
    assert got["streamed"] == got["final"] == got["streamed_async"] == got["text"]
    assert got["sampled"][0] == got["sampled"][1]
    assert got["stopped"] == [" four, five,", "stop_sequence"]
    assert "max_new_tokens" in got["error"]
    assert got["chat"][0]
    assert got["chat"][1:] == ["length", 8]


WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city", "parameters": CITY},
}


def test_huggingface_hub_chats_calls_tools_and_keeps_to_a_schema(served: Served) -> None:
    client = InferenceClient(served.url)
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat_completion(messages, max_tokens=24, temperature=0)
    answer = whole.choices[0].message.content
    assert answer is not None
    assert answer.startswith(ANSWER)
    streamed = list(client.chat_completion(messages, max_tokens=24, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == answer
    called = client.chat_completion(messages, max_tokens=80, temperature=0, tools=[WEATHER], tool_choice="required")
    assert called.choices[0].message.tool_calls is not None
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    format_: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    kept = client.chat_completion(messages, max_tokens=80, temperature=0, response_format=format_)
    assert set(json.loads(kept.choices[0].message.content or "")) == {"city"}
    grammar: Any = {"type": "json", "value": CITY}
    assert set(json.loads(client.text_generation(PROMPT, max_new_tokens=80, grammar=grammar))) == {"city"}


def test_openai_chats_calls_tools_and_keeps_to_a_schema(served: Served) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        common: Any = {"model": "any", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        whole = client.chat.completions.create(**common, max_completion_tokens=24, logprobs=True, top_logprobs=2)
        answer = whole.choices[0].message.content
        assert answer.startswith(ANSWER)
        assert len(whole.choices[0].logprobs.content) == 24
        stream = client.chat.completions.create(
            **common, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
        assert chunks[-1].usage.completion_tokens == 24
        with client.chat.completions.stream(
            **common, max_tokens=80, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}}
        ) as events:
            final = events.get_final_completion()
        assert final.choices[0].message.tool_calls is not None
        (call,) = final.choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"city"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
        said = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]}
        turns: Any = [*common["messages"], said, result]
        answered = client.chat.completions.create(**common | {"messages": turns}, tools=[WEATHER], max_tokens=8)
        assert answered.usage.completion_tokens > 0
        several = client.chat.completions.create(**common | {"temperature": 1}, max_tokens=8, n=3, seed=7)
        assert [choice.index for choice in several.choices] == [0, 1, 2]
        schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
        kept = client.chat.completions.create(**common, max_tokens=80, response_format=schema)
        assert set(json.loads(kept.choices[0].message.content)) == {"city"}
        scored = client.completions.create(model="any", prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)
        assert scored.choices[0].text.startswith(PROMPT)
        with pytest.raises(BadRequestError, match="logit_bias"):
            client.chat.completions.create(**common, logit_bias={"-1": 5})
