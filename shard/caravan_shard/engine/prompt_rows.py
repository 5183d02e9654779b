"""What the model thought of a prompt's tokens: each from the logits after the token before it."""

from collections.abc import Sequence

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Vocabulary
from caravan_shard.engine.step import Part
from caravan_shard.protocol.results import PromptRows
from caravan_shard.sampling.logprobs import token_logprobs


def tell_prompts(parts: Sequence[Part], logits: Floats, vocabulary: Vocabulary) -> tuple[PromptRows, Floats]:
    """The prompt tokens of a pass that are to be told, and those rows of ``logits`` that tokens are sampled from.

    ``logits`` [outputs, vocabulary] are all of the pass, in the order of ``parts``.
    """
    rows = PromptRows()
    sampled = []
    end = 0
    for part in parts:
        start, end = end, end + part.output_count
        if part.samples:
            sampled.append(end - 1)
        if part.told_tokens:
            _tell(rows, part, logits[start : start + part.told_tokens], vocabulary)
    return rows, logits[sampled]


def _tell(rows: PromptRows, part: Part, logits: Floats, vocabulary: Vocabulary) -> None:
    """``logits`` [told tokens, vocabulary]. A row at a time: a row fits into the processor's cache, all do not."""
    sequence = part.sequence
    before = sequence.last_logits
    assert (before is None) == (part.start == 0), f"sequence {sequence.sequence_id} at {part.start}"
    rows.sequence_ids.append(sequence.sequence_id)
    rows.counts.append(len(logits))
    for place, token in enumerate(part.tokens[: len(logits)]):
        _tell_token(rows, logits[place - 1] if place else before, token, sequence.parameters.sampling.top_n_tokens)
    end = part.start + len(logits)
    sequence.last_logits = logits[-1].copy() if end < sequence.parameters.prompt_length else None
    for top_id in rows.top_token_ids[len(rows.top_pieces) :]:
        piece = vocabulary.piece(top_id)
        rows.top_pieces.append(piece.data)
        rows.top_specials.append(piece.special)


def _tell_token(rows: PromptRows, logits: Floats | None, token: int, top_n: int) -> None:
    if logits is None:
        rows.logprobs.append(float("nan"))
        rows.top_counts.append(0)
        return
    told = token_logprobs(logits, token, top_n)
    rows.logprobs.append(told.chosen)
    rows.top_counts.append(len(told.top_ids))
    rows.top_token_ids.extend(told.top_ids)
    rows.top_logprobs.extend(told.top)
