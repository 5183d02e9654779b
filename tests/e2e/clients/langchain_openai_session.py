"""Runs in its own environment and prints as JSON what langchain-openai got."""

import json
import sys

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import BadRequestError

PROMPT = "The capital of France is"
COUNT = "One, two, three,"
QUESTION = "Describe the sea."
WEATHER = {
    "title": "weather",
    "description": "The weather of a city",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 3, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def completions(url: str) -> dict[str, object]:
    model = OpenAI(base_url=f"{url}/v1", api_key="none", model="any", max_tokens=12, temperature=0)
    try:
        model.bind(temperature=-1).invoke(PROMPT)
        error = None
    except BadRequestError as refused:
        error = str(refused)
    return {
        "text": model.invoke(PROMPT),
        "streamed": "".join(model.stream(PROMPT)),
        "batch": model.batch([PROMPT, COUNT]),
        "stopped": model.bind(stop=[" six"]).invoke(COUNT),
        "error": error,
    }


def chat(url: str) -> dict[str, object]:
    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="any", max_tokens=24, temperature=0)
    whole = model.invoke(QUESTION)
    chunks = list(model.stream(QUESTION, stream_usage=True))
    longer = model.model_copy(update={"max_tokens": 80})
    call = longer.bind_tools([WEATHER], tool_choice="weather").invoke(QUESTION)
    return {
        "text": whole.content,
        "tokens": whole.usage_metadata["output_tokens"],
        "streamed": "".join(chunk.content for chunk in chunks),
        "structured": longer.with_structured_output(WEATHER, method="json_schema").invoke("The weather in Rome"),
        "calls": [[one["name"], one["args"]] for one in call.tool_calls],
    }


def embeddings(url: str) -> list[int]:
    model = OpenAIEmbeddings(base_url=f"{url}/v1", api_key="none", model="any", check_embedding_ctx_length=False)
    return [len(vector) for vector in model.embed_documents([PROMPT, COUNT])]


def main(url: str) -> None:
    print(json.dumps({"completions": completions(url), "chat": chat(url), "embeddings": embeddings(url)}))


main(sys.argv[1])
