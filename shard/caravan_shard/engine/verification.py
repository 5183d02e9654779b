"""Verifies drafts: samples behind each draft token that equals the token sampled before it."""

from collections.abc import Sequence
from itertools import accumulate

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Backend
from caravan_shard.engine.step import Part
from caravan_shard.engine.token_rows import add_rows
from caravan_shard.protocol.results import DraftRows, TokenRows
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sequences.sequence import Phase


def verify_drafts(
    parts: Sequence[Part], logits: Floats, backend: Backend, sampler: Sampler
) -> tuple[TokenRows, DraftRows]:
    """Append to each sequence the tokens that it would get in steps without drafts; return the columns.

    ``logits`` [tokens, vocabulary] are those after each token of ``parts``, which all decode. The logits after a draft
    token count only if the tokens before it are those of the sequence. So a token is chosen from the same logits, with
    the same history, number and constraint as without drafts.
    """
    rows = TokenRows()
    starts = [0, *accumulate(len(part.tokens) for part in parts)]
    accepted = [0] * len(parts)
    going = list(range(len(parts)))
    place = 0
    while going:
        for index in going if place else ():
            matching = parts[index].sequence.matching
            if matching is not None:
                matching.find(())
        going_logits = logits[[starts[index] + place for index in going]]
        tokens = add_rows(rows, [parts[index].sequence for index in going], going_logits, backend, sampler)
        place += 1
        right = [
            index
            for index, token in zip(going, tokens, strict=True)
            if place < len(parts[index].tokens) and parts[index].tokens[place] == token
        ]
        for index in right:
            accepted[index] = place
        going = [index for index in right if parts[index].sequence.phase is Phase.RUNNING]
    return rows, _draft_rows(parts, accepted)


def _draft_rows(parts: Sequence[Part], accepted: Sequence[int]) -> DraftRows:
    columns = DraftRows()
    for part, count in zip(parts, accepted, strict=True):
        if part.draft is not None:
            columns.sequence_ids.append(part.sequence.sequence_id)
            columns.sources.append(part.draft.kind.source)
            columns.drafted.append(len(part.draft.tokens))
            columns.accepted.append(count)
    return columns
