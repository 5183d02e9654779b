"""Computes what the rows of an Evaluate ask for, from the logits after their tokens."""

from collections.abc import Sequence

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Vocabulary
from caravan_shard.engine.logprob_columns import add_entry, add_pieces
from caravan_shard.engine.step import Part
from caravan_shard.media.encoder import NO_TOKEN
from caravan_shard.protocol.results import Evaluations


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
            columns.score_logprobs += add_entry(columns, output, known, row.top_n_tokens, row.score_token_ids)
    add_pieces(columns, vocabulary)
    return columns
