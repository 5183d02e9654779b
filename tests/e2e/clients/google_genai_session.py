"""Runs in its own environment and prints as JSON what the google-genai package got."""

import asyncio
import json
import sys
from typing import Any

from google import genai
from google.genai import errors, types

MODEL = "any"
QUESTION = "Describe the sea."
BRIEF = "Be brief."
COMMON: Any = {"temperature": 0, "max_output_tokens": 24}


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city[:3]}."


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = types.FunctionDeclaration(name="weather", description="Of a city", parameters_json_schema=SCHEMA)
# The package writes the types of such a schema in upper case.
OPEN_API = types.Schema(
    type=types.Type.OBJECT,
    properties={
        "city": types.Schema(type=types.Type.STRING, max_length=20),
        "days": types.Schema(type=types.Type.INTEGER, minimum=1, maximum=9),
    },
    required=["city", "days"],
    property_ordering=["days", "city"],
)


def config(**fields: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(**COMMON | fields)


def whole(client: genai.Client) -> dict[str, object]:
    asked = config(system_instruction=BRIEF, safety_settings=[], tools=[types.Tool(google_search=types.GoogleSearch())])
    reply = client.models.generate_content(model=MODEL, contents=QUESTION, config=asked)
    chunks = list(client.models.generate_content_stream(model=MODEL, contents=QUESTION, config=asked))
    stopped = client.models.generate_content(model=MODEL, contents=QUESTION, config=config(stop_sequences=[" a"]))
    counted = client.models.count_tokens(model=MODEL, contents=QUESTION)
    plain = client.models.generate_content(model=MODEL, contents=QUESTION, config=config(candidate_count=2))
    usage, candidates = reply.usage_metadata, reply.candidates
    assert usage is not None
    assert candidates is not None
    assert plain.usage_metadata is not None
    return {
        "text": reply.text,
        "streamed": "".join(chunk.text or "" for chunk in chunks),
        "reason": candidates[0].finish_reason,
        "last_reason": (chunks[-1].candidates or [])[0].finish_reason,
        "tokens": usage.candidates_token_count,
        "total": (usage.total_token_count or 0) - (usage.prompt_token_count or 0),
        "counted": counted.total_tokens,
        "prompt": plain.usage_metadata.prompt_token_count,
        "candidates": len(plain.candidates or []),
        "stopped": stopped.text,
        "model": reply.model_version,
    }


def structured(client: genai.Client) -> dict[str, object]:
    fields: Any = {"response_mime_type": "application/json", "max_output_tokens": 200, "temperature": 1, "seed": 1}
    by_schema = client.models.generate_content(
        model=MODEL, contents=QUESTION, config=config(**fields, response_schema=OPEN_API)
    )
    by_json = client.models.generate_content(
        model=MODEL, contents=QUESTION, config=config(**fields, response_json_schema=SCHEMA)
    )
    return {"schema": json.loads(by_schema.text or ""), "json_schema": json.loads(by_json.text or "")}


def called(client: genai.Client) -> dict[str, object]:
    calling = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["weather"])
    asked = config(
        tools=[types.Tool(function_declarations=[FUNCTION])],
        tool_config=types.ToolConfig(function_calling_config=calling),
        max_output_tokens=100,
    )
    reply = client.models.generate_content(model=MODEL, contents=QUESTION, config=asked)
    (call,) = reply.function_calls or []
    chunks = list(client.models.generate_content_stream(model=MODEL, contents=QUESTION, config=asked))
    (again,) = [one for chunk in chunks for one in chunk.function_calls or []]
    contents: Any = [
        types.UserContent(QUESTION),
        (reply.candidates or [])[0].content,
        types.UserContent(types.Part.from_function_response(name="weather", response={"output": "Sunny."})),
    ]
    answer = client.models.generate_content(
        model=MODEL, contents=contents, config=config(tools=[types.Tool(function_declarations=[FUNCTION])])
    )
    return {
        "name": call.name,
        "args": call.args,
        "streamed": again.args,
        "answered": len(answer.candidates or []),
    }


def chatted(client: genai.Client) -> list[str | None]:
    chat = client.chats.create(model=MODEL, config=config(tools=[weather]))
    first = chat.send_message(QUESTION)
    return [first.text, *(content.role for content in chat.get_history())]


def refused(client: genai.Client) -> list[object]:
    got: list[object] = []
    for fields in ({"temperature": -1}, {"cached_content": "cachedContents/x"}):
        try:
            client.models.generate_content(model=MODEL, contents=QUESTION, config=config(**fields))
        except errors.ClientError as error:
            got.append([error.code, error.status, error.message])
    try:
        list(client.models.generate_content_stream(model=MODEL, contents="a " * 20_000, config=config()))
    except errors.ClientError as error:
        got.append([error.code, error.status, error.message])
    return got


async def asynchronous(client: genai.Client) -> str:
    stream = await client.aio.models.generate_content_stream(model=MODEL, contents=QUESTION, config=config())
    return "".join([chunk.text or "" async for chunk in stream])


def embedded(client: genai.Client) -> list[int]:
    contents: Any = ["The sea", "The land"]
    whole = client.models.embed_content(model=MODEL, contents=contents)
    short = client.models.embed_content(
        model=MODEL, contents=contents, config=types.EmbedContentConfig(output_dimensionality=8)
    )
    return [len(one.values or []) for one in [*(whole.embeddings or []), *(short.embeddings or [])]]


def main(url: str) -> None:
    client = genai.Client(api_key="any", http_options=types.HttpOptions(base_url=url))
    models = [model.name for model in client.models.list()]
    got = {
        "models": models,
        "model": client.models.get(model=(models[0] or "").removeprefix("models/")).supported_actions,
        "whole": whole(client),
        "structured": structured(client),
        "called": called(client),
        "chatted": chatted(client),
        "errors": refused(client),
        "asynchronous": asyncio.run(asynchronous(client)),
        "embedded": embedded(client),
    }
    print(json.dumps(got))


if __name__ == "__main__":
    main(*sys.argv[1:])
