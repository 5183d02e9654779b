"""A beam search by hand: forks of the best conversations, step by step. Usage: beams.py MODEL.gguf"""

import sys

import numpy as np

from caravan import Conversation, Executor

WIDTH = 3
PROMPT = "The best thing about Paris is"


def logprobs(conversation: Conversation) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the logarithm of the probability of each next token [vocabulary]."""
    logits = conversation.logits().astype(np.float64)
    shifted = logits - logits.max()
    found: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = shifted - np.log(np.exp(shifted).sum())
    return found


def main(model: str) -> None:
    """Print the beams, best first, with the sum of their log probabilities."""
    with Executor(model, ctx_size=1024, parallel=2 * WIDTH) as executor:
        root = executor.create()
        root.prompt(PROMPT)
        executor.infer()
        beams = [(0.0, root)]
        for _ in range(8):
            candidates = []
            for score, beam in beams:
                found = logprobs(beam)
                candidates += [(score + found[token], beam, int(token)) for token in np.argsort(-found)[:WIDTH]]
            best = sorted(candidates, key=lambda candidate: -candidate[0])[:WIDTH]
            forks = [(float(score), beam.fork(), token) for score, beam, token in best]
            for _, beam in beams:
                beam.close()
            for _, beam, token in forks:
                beam.prompt(token)
            executor.infer()
            beams = [(score, beam) for score, beam, _ in forks]
        for score, beam in beams:
            print(f"{score:.2f} {beam.text.removeprefix(PROMPT)!r}")


if __name__ == "__main__":
    main(sys.argv[1])
