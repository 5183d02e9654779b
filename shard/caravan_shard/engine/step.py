"""The parts of a step, with the embeddings of their media, and the arrays that describe it to the backend."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from caravan_proto.messages.commands import Chunk, Row, RowOutputs
from caravan_proto.messages.media import MediaFacts
from caravan_shard.arrays import Flags, Ids
from caravan_shard.backends.base import TokenBatch
from caravan_shard.checks.media import FoundMedia
from caravan_shard.media import CellSpan, MediaRows, MediaStore, held_spans, with_media
from caravan_shard.sequences.sequence import Sequence as ShardSequence
from caravan_shard.speculation.acceptance import Draft

Chunks = Sequence[Chunk | Row]


class Part(NamedTuple):
    """One sequence's share of a step: ``tokens`` go to the positions from ``start``, where the cached tokens end.

    A named tuple, since one is made for each sequence of a step and a frozen dataclass costs twice as much.

    ``samples``: the step samples the next token of the sequence.
    ``draft``: what the tokens after the first one are, if the sequence decodes; logits follow each token then.
    ``prompt``: the tokens are a chunk of the prompt; the sequence knows them only once the step has succeeded.
    ``new``: the step is the first of the sequence, which is forgotten if the step fails.
    ``row``: the tokens are those of this row.
    ``media``: embeddings in place of tokens, whose rows are counted from the first of ``tokens``.
    ``spans``: what the sequence notes of them.
    """

    sequence: ShardSequence
    start: int
    tokens: Sequence[int]
    samples: bool
    prompt: bool = False
    new: bool = False
    row: Row | None = None
    draft: Draft | None = None
    media: Sequence[MediaRows] = ()
    spans: tuple[CellSpan, ...] = ()

    def with_draft(self, draft: Draft) -> "Part":
        """Return the part with a draft behind its only token."""
        return self._replace(tokens=[self.tokens[0], *draft.tokens], draft=draft)

    def without_draft(self) -> "Part":
        """Return the part with its first token only, if the others are a draft."""
        return self if self.draft is None else self._replace(tokens=self.tokens[:1], draft=None)

    @property
    def leading_outputs(self) -> int:
        """After how many first tokens logits are needed: those with prompt logprobs, or all of a row or a draft."""
        if self.prompt:
            return self.sequence.parameters.prompt_logprob_count(self.start, len(self.tokens))
        is_whole = self.draft is not None or (self.row is not None and self.row.outputs is RowOutputs.ALL)
        return len(self.tokens) if is_whole else 0

    @property
    def has_last_output(self) -> bool:
        """Whether logits are needed after the last token, whatever is needed after others."""
        return self.samples or (self.row is not None and self.row.outputs is RowOutputs.LAST)

    @property
    def output_count(self) -> int:
        """How many rows of logits it needs."""
        count = self.leading_outputs
        return count + (self.has_last_output and count < len(self.tokens))


def single_tokens(
    tokens: Sequence[int], positions: Sequence[int], sequence_ids: Sequence[int], adapter: str = ""
) -> TokenBatch:
    """Return a token of each sequence, all with logits. It makes one array, since it runs between any two passes."""
    count = len(tokens)
    columns = np.array([*tokens, *positions, *sequence_ids], np.int32)
    return TokenBatch(columns[:count], columns[count:-count], columns[-count:], _all_outputs(count), adapter)


@lru_cache(maxsize=64)
def _all_outputs(count: int) -> Flags:
    outputs = np.ones(count, np.int8)
    outputs.flags.writeable = False
    return outputs


def assemble(parts: Sequence[Part]) -> TokenBatch:
    """Make the arrays of a step over ``parts``, which are in ascending order of sequence id and have one adapter.

    The order lets llama.cpp's split layout compute runs of consecutive ids together.
    """
    adapter = parts[0].sequence.parameters.adapter
    if not any(part.prompt or part.draft or part.row is not None for part in parts):
        ids = [part.sequence.sequence_id for part in parts]
        return single_tokens([part.tokens[0] for part in parts], [part.start for part in parts], ids, adapter)
    outputs = np.zeros(sum(len(part.tokens) for part in parts), np.int8)
    media: list[MediaRows] = []
    end = 0
    for part in parts:
        start, end = end, end + len(part.tokens)
        media += [rows._replace(row=start + rows.row) for rows in part.media]
        outputs[start : start + part.leading_outputs] = 1
        outputs[end - 1] |= part.has_last_output
    return TokenBatch(
        np.concatenate([np.array(part.tokens, np.int32) for part in parts]),
        np.concatenate([np.arange(part.start, part.start + len(part.tokens), dtype=np.int32) for part in parts]),
        np.concatenate([np.full(len(part.tokens), part.sequence.sequence_id, np.int32) for part in parts]),
        outputs,
        adapter,
        media=media,
    )


def candidates_of(parts: Sequence[Part]) -> Ids | None:
    """Return how many candidates suffice for each output; None if all logits are needed.

    They are in steps with drafts, prompt logprobs or rows, which have several outputs of a sequence, and with media,
    which are several passes.
    """
    if any(part.draft is not None or part.row is not None or part.media or part.leading_outputs for part in parts):
        return None
    return np.array([part.sequence.candidates for part in parts if part.samples], np.int32)


def find_media(store: MediaStore, chunks: Chunks) -> FoundMedia:
    """Return the embeddings that a step needs, as far as they are here. They stay valid when they are forgotten."""
    return {span.media_id: store.find(span.media_id) for chunk in chunks for span in chunk.media}


def parts_with_media(parts: Sequence[Part], chunks: Chunks, media: FoundMedia, facts: MediaFacts | None) -> list[Part]:
    """Return the parts of a step with the embeddings of their spans, all of which are here.

    The first parts are those of ``chunks``; others ride.
    """
    with_rows = [
        part._replace(
            tokens=with_media(chunk.token_ids, chunk.media),
            media=_rows(chunk, media),
            spans=held_spans(facts, chunk.media, chunk.start),
        )
        for part, chunk in zip(parts, chunks, strict=False)
    ]
    return [*with_rows, *parts[len(with_rows) :]]


def _rows(chunk: Chunk | Row, media: FoundMedia) -> list[MediaRows]:
    rows = []
    for span in chunk.media:
        slices = media[span.media_id]
        assert slices is not None, "a medium is missing"
        rows.append(MediaRows(span.offset, slices[span.slice_index], span.first, span.count))
    return rows
