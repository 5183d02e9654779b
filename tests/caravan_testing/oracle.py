"""Judges outputs of the demo model by llama-cpp-python's Llama, which runs one text at a time.

Other batch shapes take other kernels, which round differently: an output may differ where two tokens are nearly tied.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from caravan_shard.sampling.draw import uniform
from caravan_testing.serve_process import MODEL

# Seen on the demo model: below 0.1.
TIE_LOGITS = 0.25


class Oracle:
    """Generates one sequence at a time, and returns the logits behind its tokens."""

    def __init__(self) -> None:
        from llama_cpp import Llama

        self.llama = Llama(
            str(MODEL), n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn=True, logits_all=True, verbose=False
        )

    def greedy(self, prompt: str, new_tokens: int) -> list[int]:
        """Return the output tokens, including the end token."""
        self.llama.reset()
        output: list[int] = []
        for token in self.llama.generate(self._tokens(prompt), temp=0.0):
            output.append(token)
            if len(output) == new_tokens or token == self.llama.token_eos():
                break
        return output

    def logits_after(self, prompt: str, output: list[int]) -> Any:
        """Return the logits [vocabulary] of the next token."""
        return self.logits_of(prompt, [*output, 0])[-1]

    def logits_of(self, prompt: str, output: list[int]) -> Any:
        """Return the logits [output, vocabulary] that each token of ``output`` was chosen from."""
        tokens = self._tokens(prompt)
        self.llama.reset()
        self.llama.eval([*tokens, *output[:-1]])
        return np.array(self.llama.scores[len(tokens) - 1 : self.llama.n_tokens])

    def prompt_length(self, prompt: str) -> int:
        """Return the length of ``prompt`` in tokens."""
        return len(self._tokens(prompt))

    def _tokens(self, prompt: str) -> list[int]:
        return list(self.llama.tokenize(prompt.encode(), add_bos=True, special=True))


def check_same(
    oracle: Oracle, prompt: str, expected: list[int], got: list[int], tie_logits: float = TIE_LOGITS
) -> None:
    """Check that the outputs are equal, or first differ at a tie."""
    for place, (ours, theirs) in enumerate(zip(got, expected, strict=False)):
        if ours != theirs:
            logits = oracle.logits_after(prompt, expected[:place])
            gap = abs(float(logits[ours] - logits[theirs]))
            assert gap < tie_logits, f"{prompt!r} differs at token {place}: {ours} for {theirs}, {gap:.4f} logits apart"
            return
    assert len(got) == len(expected)


def greedy_gap(oracle: Oracle, prompt: str, output: list[int]) -> float:
    """Return by how much a token of ``output`` was behind the likeliest one at most, in logits."""
    return max(
        float(logits.max() - logits[token])
        for token, logits in zip(output, oracle.logits_of(prompt, output), strict=True)
    )


def draw_gap(oracle: Oracle, prompt: str, seed: int, output: list[int]) -> float:
    """Return how far the number of a position was from selecting its token at most, at temperature 1 without filters.

    In logits: so much must the tokens on one side of a border gain on those on the other side.
    """
    gaps = []
    for _, number, low, high in _drawn(oracle, prompt, seed, output):
        border = low if number < low else high if number > high else number
        gaps.append(abs(_logit(border) - _logit(number)))
    return max(gaps)


def _logit(share: float) -> float:
    share = min(max(share, 1e-12), 1 - 1e-12)
    return float(np.log(share / (1 - share)))


def _drawn(oracle: Oracle, prompt: str, seed: int, output: list[int]) -> Iterator[tuple[int, float, float, float]]:
    """Yield each token of ``output``, the number of its position, and between which numbers it is selected."""
    start = oracle.prompt_length(prompt)
    for place, (token, logits) in enumerate(zip(output, oracle.logits_of(prompt, output), strict=True)):
        weights = np.exp(logits.astype(np.float64) - logits.max())
        cumulative = np.cumsum(weights) / weights.sum()
        low, high = (float(cumulative[token - 1]) if token else 0.0), float(cumulative[token])
        yield token, uniform(seed, start + place), low, high


WORDS = ("sun", "moon", "star", "sea", "tree", "house", "red", "blue", "one", "two", "king", "queen", "river", "road")


def repeated_list(number: int, words: int, chance: random.Random) -> str:
    """Return a list of random words, twice, and the beginning of a third time. ``number`` makes it unique."""
    listed = " ".join(chance.choices(WORDS, k=words))
    return f"{number} {listed}\n{number} {listed}\n{number}"
