"""Checks one row of an Evaluate against what the shard will hold."""

from collections.abc import Iterator, Sequence

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Row, RowOutputs
from caravan_proto.messages.model import ModelFile
from caravan_shard.backends.base import Capacity
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.checks.media import MediaCheck, check_border
from caravan_shard.checks.preview import Preview
from caravan_shard.checks.sampling import MAX_TOP_N_TOKENS, check_score_ids
from caravan_shard.media.spans import held_spans
from caravan_shard.protocol.results import Refusal, bad_request
from caravan_shard.sequences.sequence import Phase

_SHOWN_CHARACTERS = 128


class RowCheck:
    """Checks the rows of one command, whose header ``preview`` has seen."""

    def __init__(
        self, preview: Preview, capacity: Capacity, facts: ModelFile, media: MediaCheck, *, draining: bool
    ) -> None:
        self._preview = preview
        self._check_media = media
        self._capacity = capacity
        self._facts = facts
        self._draining = draining

    @first_refusal
    def __call__(self, row: Row) -> Iterator[Refusal | None]:
        """Check one row."""
        if not row.token_ids:
            yield bad_request(f"the row of sequence {row.sequence_id} is empty")
        yield self._check_ids("token ids", row.token_ids)
        yield self._check_media(row.media, row.token_ids)
        yield self._check_outputs(row)
        if row.takes_over or self._preview.find(row.sequence_id) is None:
            yield self._check_new(row)
        else:
            yield self._check_held(row)
        most = self._capacity.current.cells_per_sequence
        if row.end > most:
            yield Refusal(ShardError.SEQUENCE_TOO_LONG, f"a sequence holds {most} tokens. Given: {row.end}")
        yield self._check_kept(row)

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> Refusal | None:
        wrong = [token for token in token_ids if not 0 <= token < self._facts.vocabulary_size]
        return bad_request(f"{name} must be < {self._facts.vocabulary_size}. Given: {wrong[0]}") if wrong else None

    def _check_outputs(self, row: Row) -> Refusal | None:
        if row.outputs is None:
            return bad_request("outputs must be none, last or all")
        most = min(MAX_TOP_N_TOKENS, self._facts.vocabulary_size)
        if not 0 <= row.top_n_tokens <= most:
            return bad_request(f"top_n_tokens must be <= {most}. Given: {row.top_n_tokens}")
        if row.outputs is RowOutputs.NONE and (row.top_n_tokens or row.score_token_ids):
            return bad_request("top_n_tokens and score_token_ids need outputs")
        return check_score_ids(row.score_token_ids, self._facts.vocabulary_size)

    @first_refusal
    def _check_new(self, row: Row) -> Iterator[Refusal | None]:
        """Check a row that makes a new sequence."""
        if row.copy is not None:
            yield self._preview.check_prefix(row.copy, row.adapter)
            yield _check_start(row, row.copy.length)
            return
        if self._draining:
            yield Refusal(ShardError.DRAINING, "this shard is shutting down and takes no new sequence")
        if row.adapter and row.adapter not in self._facts.adapters:
            yield bad_request(f"there is no adapter {row.adapter[:_SHOWN_CHARACTERS]!r} here")
        yield _check_start(row, 0)

    @first_refusal
    def _check_held(self, row: Row) -> Iterator[Refusal | None]:
        """Check a row that continues a held sequence."""
        if row.copy is not None:
            yield Refusal(ShardError.SEQUENCE_EXISTS, f"sequence {row.sequence_id} is held and takes no copy")
        if row.adapter != self._preview.parameters(row.sequence_id).adapter:
            yield bad_request(f"sequence {row.sequence_id} was computed with another adapter")
        yield _check_start(row, self._preview.length(row.sequence_id))
        if self._preview.phase(row.sequence_id) is not Phase.ENDED and row.kept != row.start:
            yield Refusal(
                ShardError.WRONG_POSITION,
                f"sequence {row.sequence_id} has not ended: keep_length must be {row.start}. Given: {row.kept}",
            )

    def _check_kept(self, row: Row) -> Refusal | None:
        if not 0 <= row.kept <= row.end:
            return Refusal(ShardError.WRONG_POSITION, f"keep_length must be <= {row.end}. Given: {row.kept}")
        limits = self._capacity.current
        # A step with media is computed in parts, of which llama.cpp keeps the states of the last one only.
        least = row.end if row.media else max(row.start + 1, row.end - limits.rollback_tokens)
        if limits.whole_only and 0 < row.kept < least:
            return Refusal(
                ShardError.WRONG_POSITION,
                "this model's memory is recurrent and cannot be cut back so far: "
                f"keep_length must be 0 or {row.end if least == row.end else f'>= {least}'}. Given: {row.kept}",
            )
        source = self._preview.find(row.sequence_id if row.copy is None else row.copy.source_id)
        spans = held_spans(self._facts.media, row.media, row.start)
        if source is not None and row.kept < row.start:
            spans += source.spans
        return check_border(spans, row.kept)


def _check_start(row: Row, held: int) -> Refusal | None:
    if row.start == held:
        return None
    return Refusal(
        ShardError.WRONG_POSITION, f"the row of sequence {row.sequence_id} starts at {held}. Given: {row.start}"
    )
