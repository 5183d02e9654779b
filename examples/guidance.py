"""Classifier-free guidance: away from what the model would say without the instruction. Usage: guidance.py MODEL.gguf

Two conversations get the same tokens after different prompts. The logits of the guided one are moved away from those
of the other, by `strength` times their difference (Sanchez et al. 2023, arXiv:2306.17806).
"""

import sys

import numpy as np
from numpy.typing import NDArray

from caravan import Executor

INSTRUCTION = "The following text is about the sea.\n\n"
START = "Yesterday I went for a walk and I saw"


def guided_text(executor: Executor, strength: float, count: int) -> str:
    """Return ``count`` tokens after `START`; with a strength of 0, as the instruction alone would have them."""
    with executor.create() as guided, executor.create() as plain:
        guided.prompt(INSTRUCTION + START)
        plain.prompt(START)
        executor.infer()
        text = ""

        def away_from_plain(logits: NDArray[np.float32]) -> int:
            return int((logits + strength * (logits - plain.logits())).argmax())

        for _ in range(count):
            token = guided.sample(away_from_plain)
            if token.ends:
                break
            text += token.text
            guided.prompt(token)
            plain.prompt(token)
            executor.infer()
        return text


def main(model: str) -> None:
    """Print the text without and with guidance."""
    with Executor(model, ctx_size=1024, parallel=2) as executor:
        for strength in (0.0, 1.5):
            print(f"strength {strength}: {guided_text(executor, strength, 16)!r}")


if __name__ == "__main__":
    main(sys.argv[1])
