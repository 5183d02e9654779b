"""Save a conversation and a whole batch, and continue them. Usage: save_and_load.py MODEL.gguf FOLDER"""

import sys
from pathlib import Path

from caravan import Executor

TOPICS = ("rivers", "bread", "the moon")


def main(model: str, folder: str) -> None:
    """Print what each conversation writes after it was loaded."""
    one, batch = Path(folder) / "one.caravan", Path(folder) / "batch.caravan"
    with Executor(model, ctx_size=1024) as executor:
        for topic in TOPICS:
            executor.create().prompt(f"Here is a short text about {topic}:")
        executor.infer()
        executor.conversations[0].save(one)
        executor.save(batch)
    print(f"{one.stat().st_size} and {batch.stat().st_size} bytes")

    with Executor.open(batch, ctx_size=1024) as executor:
        again = executor.load(one)
        for conversation in executor.conversations:
            print(f"{conversation.held} tokens loaded: {''.join(token.text for token in conversation.generate(8))!r}")
        print(again.text == executor.conversations[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
