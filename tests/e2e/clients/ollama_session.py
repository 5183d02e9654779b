"""Runs in its own environment and prints as JSON what Ollama's own client got."""

import asyncio
import json
import sys

from ollama import AsyncClient, Client, ResponseError

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "Describe the sea."}]
GREEDY = {"temperature": 0, "num_predict": 24}
SHORT = {"temperature": 0, "num_predict": 12}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


async def chat_async(url: str) -> str:
    stream = await AsyncClient(url).chat("any", QUESTION, stream=True, options=GREEDY)
    return "".join([part.message.content or "" async for part in stream])


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return city


def main(url: str) -> None:
    client = Client(url)
    whole = client.generate("any", PROMPT, raw=True, options=SHORT)
    parts = list(client.generate("any", PROMPT, raw=True, stream=True, options=SHORT))
    listed = client.list()
    [running] = client.ps().models
    shown = client.show(listed.models[0].model)
    chat = client.chat("any", QUESTION, options=GREEDY)
    structured = client.chat("any", QUESTION, format=SCHEMA, options={"temperature": 0, "num_predict": 60})
    # The model decides whether it calls the tool; the client must understand both replies.
    offered = client.chat("any", QUESTION, tools=[weather], options={"temperature": 0, "num_predict": 30})
    first = client.generate("any", "My name is Ann.", options=SHORT)
    second = client.generate("any", "What is my name?", context=first.context, options=SHORT)
    embedded = client.embed("any", ["one text", "another"], dimensions=4)
    truncated = client.embed("any", "many words " * 2000)
    try:
        client.generate("any", PROMPT, options={"temperature": -1})
        error = None
    except ResponseError as refused:
        error = [refused.status_code, refused.error]
    got = {
        "text": whole.response,
        "done": [whole.done, whole.done_reason, whole.eval_count],
        "streamed": "".join(part.response for part in parts),
        "last": [parts[-1].done, parts[-1].done_reason, parts[-1].eval_count],
        "models": [model.model for model in listed.models],
        "details": [model.details.model_dump() for model in (listed.models[0], running, shown)],
        "sizes": [listed.models[0].size, running.size],
        "modified": [time is not None for time in (listed.models[0].modified_at, shown.modified_at)],
        "running": [running.name, running.expires_at.year, running.context_length],
        "capabilities": shown.capabilities,
        "model_info": shown.modelinfo,
        "chat": chat.message.content,
        "chat_streamed": "".join(
            part.message.content or "" for part in client.chat("any", QUESTION, stream=True, options=GREEDY)
        ),
        "chat_async": asyncio.run(chat_async(url)),
        "structured": json.loads(structured.message.content or ""),
        "offered": bool(offered.message.content or offered.message.tool_calls),
        "raw_context": whole.context,
        "contexts": [first.context, second.context],
        "embeddings": [len(vector) for vector in (*embedded.embeddings, *truncated.embeddings)],
        "embedded_tokens": [embedded.prompt_eval_count, truncated.prompt_eval_count],
        "older_embedding": len(client.embeddings("any", "one text").embedding),
        "error": error,
    }
    print(json.dumps(got))


main(sys.argv[1])
