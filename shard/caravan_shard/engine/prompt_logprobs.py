"""Computes prompt logprobs: the log probability of each prompt token, from the logits after the token before it."""

from collections.abc import Sequence

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Vocabulary
from caravan_shard.engine.step import Part
from caravan_shard.protocol.results import PromptLogprobs
from caravan_shard.sampling.logprobs import token_logprobs


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
        if part.prompt_logprob_count:
            _add_part(columns, part, logits[start : start + part.prompt_logprob_count], vocabulary)
    return columns, logits[sampled]


def _add_part(columns: PromptLogprobs, part: Part, logits: Floats, vocabulary: Vocabulary) -> None:
    """Add the prompt logprobs of one part. ``logits`` [tokens, vocabulary] are those after each of its tokens.

    Goes row by row: one row fits into the processor's cache, all of them do not.
    """
    sequence = part.sequence
    before = sequence.last_logits
    assert (before is None) == (part.start == 0), f"sequence {sequence.sequence_id} at {part.start}"
    columns.sequence_ids.append(sequence.sequence_id)
    columns.counts.append(len(logits))
    for place, token in enumerate(part.tokens[: len(logits)]):
        _add_token(columns, logits[place - 1] if place else before, token, sequence.parameters.sampling.top_n_tokens)
    end = part.start + len(logits)
    sequence.last_logits = logits[-1].copy() if end < sequence.parameters.prompt_length else None
    for top_id in columns.top_token_ids[len(columns.top_pieces) :]:
        piece = vocabulary.piece(top_id)
        columns.top_pieces.append(piece.data)
        columns.top_specials.append(piece.special)


def _add_token(columns: PromptLogprobs, logits: Floats | None, token: int, top_n: int) -> None:
    if logits is None:
        columns.logprobs.append(float("nan"))
        columns.top_counts.append(0)
        return
    found = token_logprobs(logits, token, top_n)
    columns.logprobs.append(found.chosen)
    columns.top_counts.append(len(found.top_ids))
    columns.top_token_ids.extend(found.top_ids)
    columns.top_logprobs.extend(found.top)
