"""A sampler and a stopping criterion that the program defines. Usage: custom_sampler.py MODEL.gguf"""

import sys

import numpy as np
from numpy.typing import NDArray

from caravan import Executor, Token


def main(model: str) -> None:
    """Print a text without the letter e, up to the end of its first sentence or 40 tokens."""
    with Executor(model, ctx_size=1024) as executor:
        vocabulary = executor.backend.vocabulary
        barred = [number for number, piece in enumerate(vocabulary.pieces()) if b"e" in piece.data.lower()]

        def without_e(logits: NDArray[np.float32]) -> int:
            logits[barred] = -np.inf
            return int(logits.argmax())

        def ends_a_sentence(token: Token) -> bool:
            return token.text.rstrip().endswith((".", "!", "?"))

        conversation = executor.create()
        conversation.prompt("A day at my aunt's farm: I")
        print("".join(token.text for token in conversation.generate(40, without_e, stop=ends_a_sentence)))


if __name__ == "__main__":
    main(sys.argv[1])
