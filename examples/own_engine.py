"""Two texts with a common beginning on an engine that this program has. Usage: own_engine.py MODEL.gguf"""

import sys
from collections.abc import Sequence

import numpy as np

from caravan.lowlevel import Backend, Choice, DecodeOutcome, SamplingParams, TokenBatch, make_sampler, open_backend

START = "The best thing about"
ENDS = (" winter is", " coffee is")


def step(backend: Backend, tokens: Sequence[int], positions: Sequence[int], ids: Sequence[int]) -> None:
    """Compute one forward pass, with logits after each token."""
    columns = np.array([tokens, positions, ids], np.int32)
    outcome = backend.decode(TokenBatch(columns[0], columns[1], columns[2], np.ones(len(tokens), np.int8)))
    if outcome is not DecodeOutcome.OK:
        raise RuntimeError(f"the step failed: {outcome.value}")


def main(model: str) -> None:
    """Print both texts."""
    backend = open_backend(model, ctx_size=1024, parallel=2, kv_layout="unified")
    sampler = make_sampler(backend)
    tokenize, piece = backend.vocabulary.tokenize, backend.vocabulary.piece
    start = tokenize(START, add_special=True, parse_special=False)
    step(backend, start, range(len(start)), [0] * len(start))
    # Both sequences have the cells of the beginning.
    backend.copy(0, 1, len(start))
    texts = [[*start, *tokenize(end, add_special=False, parse_special=False)] for end in ENDS]
    new = [text[len(start) :] for text in texts]
    for _ in range(16):
        rows = [
            (token, len(text) - len(more) + place, number)
            for number, (text, more) in enumerate(zip(texts, new, strict=True))
            for place, token in enumerate(more)
        ]
        step(backend, *zip(*rows, strict=True))
        last = np.cumsum([len(more) for more in new]) - 1
        choices = [Choice(SamplingParams(temperature=0.0), len(text)) for text in texts]
        chosen = sampler.choose(backend.logits(len(rows))[last], choices)
        for text, token in zip(texts, chosen, strict=True):
            text.append(token)
        new = [[token] for token in chosen]
    for text in texts:
        print(b"".join(piece(token).data for token in text if not piece(token).special).decode(errors="replace"))
    sampler.close()
    backend.close()


if __name__ == "__main__":
    main(sys.argv[1])
