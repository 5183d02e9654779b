"""Runs in Ollama's client's environment: pulls a model, uses it and deletes it, and prints as JSON what it got."""

import json
import sys

from ollama import Client, ResponseError

GREEDY = {"temperature": 0, "num_predict": 12}
QUESTION = [{"role": "user", "content": "Describe the sea."}]


def main(url: str, repository: str) -> None:
    client = Client(url)
    steps = list(client.pull(f"hf.co/{repository}", stream=True))
    [listed] = client.list().models
    name = listed.model
    cold = client.show(name)
    idle = [running.name for running in client.ps().models]
    chunks = list(client.chat(name, QUESTION, stream=True, options=GREEDY))
    generated = client.generate(
        f"hf.co/{repository}", "The capital of France is", raw=True, options=GREEDY, keep_alive="1h"
    )
    [running] = client.ps().models
    shown = client.show(name)
    created = client.create("brief", from_=name, parameters={"num_predict": 2}, system="Be brief.")
    copied = client.copy("brief", "short")
    short = client.chat("short", QUESTION)
    short_shown = client.show("short")
    names = [model.model for model in client.list().models]
    for made in ("brief", "short"):
        client.delete(made)
    again = client.pull(name)
    deleted = client.delete(name)
    try:
        client.generate(name, "a")
        refused = None
    except ResponseError as error:
        refused = error.status_code
    got = {
        "statuses": [step.status for step in steps],
        "progress": [[step.digest, step.completed or 0, step.total] for step in steps if step.total],
        "name": name,
        "listed": [listed.size, listed.modified_at is not None, listed.digest],
        "idle": idle,
        "chat": "".join(chunk.message.content or "" for chunk in chunks),
        "chat_end": [chunks[-1].done, chunks[-1].done_reason],
        "text": generated.response,
        "running": [running.name, running.expires_at.year < 2100],
        "digest": running.digest,
        "cold": cold.model_dump(mode="json"),
        "shown": shown.model_dump(mode="json"),
        "made": [created.status, copied.status, short.eval_count, short_shown.parameters.split(), names],
        "again": again.status,
        "deleted": deleted.status,
        "left": [model.model for model in client.list().models],
        "refused": refused,
    }
    print(json.dumps(got))


main(*sys.argv[1:])
