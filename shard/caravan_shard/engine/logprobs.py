"""Computes log probabilities of tokens that are known: those of prompts, and what the rows of an Evaluate ask for."""

import math
from collections.abc import Sequence

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Vocabulary
from caravan_shard.engine.step import Part
from caravan_shard.media import NO_TOKEN
from caravan_shard.protocol.results import Evaluations, PromptLogprobs
from caravan_shard.sampling.logprobs import NO_LOGPROBS, token_logprobs


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
    columns.add_pieces(vocabulary)
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
        if known is None:
            columns.add(NO_LOGPROBS)
            continue
        found = token_logprobs(known, token, sequence.parameters.sampling.top_n_tokens)
        columns.add(found)
        is_broken = is_broken or math.isnan(found.chosen)
    if is_broken:
        columns.without_logits.append(sequence.sequence_id)
    end = part.start + len(logits)
    sequence.last_logits = logits[-1].copy() if end < sequence.parameters.prompt_length else None


def take_evaluations(parts: Sequence[Part], logits: Floats, vocabulary: Vocabulary) -> Evaluations:
    """Return the evaluations of a step. ``logits`` [outputs, vocabulary] are all of it, in the order of ``parts``."""
    columns = Evaluations()
    end = 0
    for part in parts:
        row, count = part.row, part.output_count
        assert row is not None, f"sequence {part.sequence.sequence_id} has no row"
        if count == 0:
            continue
        start, end = end, end + count
        columns.sequence_ids.append(row.sequence_id)
        columns.counts.append(count)
        # Each token that has an output before it, and none after the last token.
        following = (*part.tokens[len(part.tokens) - count + 1 :], None)
        for output, token in zip(logits[start:end], following, strict=True):
            known = None if token == NO_TOKEN else token
            found = token_logprobs(output, known, row.top_n_tokens, row.score_token_ids)
            columns.add(found)
            columns.score_logprobs += found.others
    columns.add_pieces(vocabulary)
    return columns
