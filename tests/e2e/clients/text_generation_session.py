"""Runs in its own environment, because TGI's client pins an old huggingface_hub, and prints as JSON what it got."""

import asyncio
import json
import sys

from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import Message

PROMPT = "The capital of France is"


async def stream_async(url: str) -> str:
    client = AsyncClient(url, timeout=600)
    events = [event async for event in client.generate_stream(PROMPT, max_new_tokens=12)]
    return "".join(event.token.text for event in events)


def main(url: str) -> None:
    client = Client(url, timeout=600)
    answer = client.generate(PROMPT, max_new_tokens=12)
    events = list(client.generate_stream(PROMPT, max_new_tokens=12))
    # Few tokens: cached prompt tokens may be rounded differently, which can change a draw between two near tokens.
    sampled = [
        client.generate(PROMPT, max_new_tokens=4, do_sample=True, temperature=0.9, top_p=0.9, seed=5).generated_text
        for _ in range(2)
    ]
    stopped = client.generate("One, two, three,", max_new_tokens=20, stop_sequences=[" six"])
    chat = client.chat([Message(role="user", content="Name three colours.")], max_tokens=8, seed=1)
    try:
        client.generate(PROMPT, max_new_tokens=10_000_000)
        error = None
    except ValidationError as refused:
        error = str(refused)
    print(
        json.dumps(
            {
                "text": answer.generated_text,
                "tokens": len(answer.details.tokens),
                "finish": answer.details.finish_reason.value,
                "streamed": "".join(event.token.text for event in events),
                "final": events[-1].generated_text,
                "streamed_async": asyncio.run(stream_async(url)),
                "sampled": sampled,
                "stopped": [stopped.generated_text, stopped.details.finish_reason.value],
                "chat": [
                    chat.choices[0].message.content,
                    chat.choices[0].finish_reason,
                    chat.usage["completion_tokens"],
                ],
                "error": error,
            }
        )
    )


main(sys.argv[1])
