"""Rewind the last answer and sample it again. Usage: retry.py MODEL.gguf"""

import sys

from caravan import Executor, SamplingParams


def main(model: str) -> None:
    """Print three answers to one question; the first and the last have the same seed."""
    with Executor(model, ctx_size=1024) as executor:
        conversation = executor.create()
        conversation.prompt("Question: Name a colour.\nAnswer: A nice colour is")
        executor.infer()
        asked = conversation.token_count
        for seed in (1, 2, 1):
            params = SamplingParams(temperature=1.2, seed=seed)
            answer = "".join(token.text for token in conversation.generate(8, params))
            print(f"seed {seed}: {answer!r}")
            conversation.rewind(conversation.token_count - asked)
            # The logits after the question are computed once more.
            conversation.prompt([])
            executor.infer()


if __name__ == "__main__":
    main(sys.argv[1])
