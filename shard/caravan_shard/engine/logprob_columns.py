"""Fills the columns of log probabilities that prompts and rows have in common."""

from collections.abc import Sequence

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Vocabulary
from caravan_shard.protocol.results import LogprobColumns
from caravan_shard.sampling.logprobs import token_logprobs


def add_entry(
    columns: LogprobColumns, logits: Floats | None, token: int | None, top_n: int, others: Sequence[int] = ()
) -> list[float]:
    """Add the log probability of ``token``, and ``top_n`` alternatives, and return those of ``others``.

    NaN without a token, and without ``logits`` [vocabulary], which are those before it.
    """
    if logits is None:
        columns.logprobs.append(float("nan"))
        columns.top_counts.append(0)
        return []
    found = token_logprobs(logits, token, top_n, others)
    columns.logprobs.append(found.chosen)
    columns.top_counts.append(len(found.top_ids))
    columns.top_token_ids.extend(found.top_ids)
    columns.top_logprobs.extend(found.top)
    return found.others


def add_pieces(columns: LogprobColumns, vocabulary: Vocabulary) -> None:
    """Add the pieces of the alternatives that have none yet."""
    for top_id in columns.top_token_ids[len(columns.top_pieces) :]:
        piece = vocabulary.piece(top_id)
        columns.top_pieces.append(piece.data)
        columns.top_specials.append(piece.special)
