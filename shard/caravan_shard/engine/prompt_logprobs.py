"""Computes prompt logprobs: the log probability of each prompt token, from the logits after the token before it."""

import math
from collections.abc import Sequence

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Vocabulary
from caravan_shard.engine.logprob_columns import add_entry, add_pieces
from caravan_shard.engine.step import Part
from caravan_shard.media.encoder import NO_TOKEN
from caravan_shard.protocol.results import PromptLogprobs


def take_prompt_logprobs(
    parts: Sequence[Part], logits: Floats, vocabulary: Vocabulary
) -> tuple[PromptLogprobs, Floats]:
    """Return the prompt logprobs of a step, and the rows of ``logits`` that tokens are sampled from.

    ``logits`` [outputs, vocabulary] are all of the step, in the order of ``parts``.
    """
    columns = PromptLogprobs()
    sampled = []
    end = 0
    for part in parts:
        start, end = end, end + part.output_count
        if part.samples:
            sampled.append(end - 1)
        if part.leading_outputs:
            _add_part(columns, part, logits[start : start + part.leading_outputs])
    add_pieces(columns, vocabulary)
    return columns, logits[sampled]


def _add_part(columns: PromptLogprobs, part: Part, logits: Floats) -> None:
    """Add the prompt logprobs of one part. ``logits`` [tokens, vocabulary] are those after each of its tokens.

    Goes row by row: one row fits into the processor's cache, all of them do not.
    """
    sequence = part.sequence
    before = sequence.last_logits
    assert (before is None) == part.new, f"sequence {sequence.sequence_id} at {part.start}"
    columns.sequence_ids.append(sequence.sequence_id)
    columns.counts.append(len(logits))
    is_broken = False
    for place, token in enumerate(part.tokens[: len(logits)]):
        known = logits[place - 1] if place else before
        # A medium has none.
        known = None if token == NO_TOKEN else known
        add_entry(columns, known, token, sequence.parameters.sampling.top_n_tokens)
        is_broken = is_broken or (known is not None and math.isnan(columns.logprobs[-1]))
    if is_broken:
        columns.without_logits.append(sequence.sequence_id)
    end = part.start + len(logits)
    sequence.last_logits = logits[-1].copy() if end < sequence.parameters.prompt_length else None
