"""A beam search written plainly, over whole rows of logprobs: what a search by shards must return.

It follows ``GenerationMixin._beam_search`` of Hugging Face's transformers 5.23 (src/transformers/generation/utils.py),
for one prompt and without its tensors.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from caravan_scheduler.core.generation import EarlyStopping, GenerationSpec


class BeamOutput(NamedTuple):
    score: float
    tokens: tuple[int, ...]


def beam_outputs(
    logprobs_after: Callable[[tuple[int, ...]], Sequence[float]], spec: GenerationSpec
) -> list[BeamOutput]:
    """Return as many outputs as the search of ``spec`` is wide, best first, end tokens included.

    ``logprobs_after``: returns the logprob of each token of the vocabulary after some tokens.
    """
    search, stopping = spec.beams, spec.stopping
    assert search is not None
    ends = set(stopping.stop_token_ids) | (set() if stopping.ignore_eos else set(search.eos_token_ids))
    width, penalty, longest = search.width, search.length_penalty, stopping.max_new_tokens
    keep = max(2, 1 + len(ends)) * width
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[BeamOutput] = []
    for length in range(1, longest + 1):
        rows = [(total, tokens, logprobs_after(spec.prompt + tokens)) for total, tokens in running]
        found = [
            (total + logprob, -place, -token, (*tokens, token))
            for place, (total, tokens, row) in enumerate(rows)
            for token, logprob in enumerate(row)
        ]
        best = heapq.nlargest(keep, found)
        for total, _, _, tokens in best[:width]:
            if tokens[-1] in ends or length == longest:
                finished.append(BeamOutput(total / length**penalty, tokens))
        finished = sorted(finished, key=lambda one: -one.score)[:width]
        running = [(total, tokens) for total, _, _, tokens in best if tokens[-1] not in ends][:width]
        if len(finished) == width:
            if search.early_stopping is EarlyStopping.YES:
                break
            judged = longest if search.early_stopping is EarlyStopping.NEVER and penalty > 0 else length
            if running[0][0] / judged**penalty <= finished[-1].score:
                break
    return finished
