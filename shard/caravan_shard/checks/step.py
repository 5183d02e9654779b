"""Checks what a step computes, a prompt chunk or a row of an Evaluate, against what the shard will hold."""

import re
from collections.abc import Collection, Iterator

from caravan_proto.errors import ShardError
from caravan_proto.limits import MAX_STOP_TOKEN_IDS, MAX_THOUGHT_CLOSINGS, MAX_THOUGHT_MARKER
from caravan_proto.messages.commands import Chunk, Row, RowOutputs
from caravan_proto.messages.constraint import Thought
from caravan_proto.messages.model import ModelFile
from caravan_shard.backends.base import Capacity
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.checks.media import MediaCheck, check_border
from caravan_shard.checks.preview import Preview
from caravan_shard.checks.sampling import MAX_TOP_N_TOKENS, check_sampling, check_score_ids
from caravan_shard.checks.tokens import check_ids
from caravan_shard.media import held_spans
from caravan_shard.protocol.commands import PreparedParameters
from caravan_shard.protocol.results import Refusal, bad_request
from caravan_shard.sequences.sequence import Phase

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SHOWN_CHARACTERS = 128
_MOST_POOL_BYTES = 64
# Far more than any sequence reaches: a token changes mirostat's value by a few thousand at most.
MAX_FEEDBACK = 1e12


DRAINING = Refusal(ShardError.DRAINING, "this shard is shutting down and takes no new sequence")


def check_adapter(adapter: str, facts: ModelFile) -> Refusal | None:
    """Check that the model has an adapter of this name; empty for none."""
    if not adapter or adapter in facts.adapters:
        return None
    return bad_request(f"there is no adapter {adapter[:_SHOWN_CHARACTERS]!r} here")


class _StepCheck:
    """Checks the parts of one command, whose header ``preview`` has seen."""

    def __init__(
        self, preview: Preview, capacity: Capacity, facts: ModelFile, media: MediaCheck, *, draining: bool
    ) -> None:
        self._preview = preview
        self._check_media = media
        self._capacity = capacity
        self._facts = facts
        self._draining = draining

    def _check_ids(self, name: str, token_ids: Collection[int]) -> Refusal | None:
        return check_ids(name, token_ids, self._facts.vocabulary_size)


class ChunkCheck(_StepCheck):
    """Checks prompt chunks."""

    def __call__(self, chunk: Chunk) -> Refusal | None:
        """Check the first chunk of a sequence or a further one."""
        if not chunk.token_ids:
            return bad_request(f"the chunk of sequence {chunk.sequence_id} is empty")
        refusal = self._check_ids("token ids", chunk.token_ids) or self._check_media(chunk.media, chunk.token_ids)
        if refusal is not None:
            return refusal
        sequence = self._preview.find(chunk.sequence_id)
        if sequence is None or chunk.takes_over:
            if chunk.setup is None:
                return Refusal(
                    ShardError.UNKNOWN_SEQUENCE,
                    f"sequence {chunk.sequence_id} has not begun and comes without parameters",
                )
            assert isinstance(chunk.setup, PreparedParameters)
            return self._check_first(chunk, chunk.setup)
        if chunk.setup is not None or chunk.copy is not None:
            return Refusal(ShardError.SEQUENCE_EXISTS, f"sequence {chunk.sequence_id} has begun already")
        if self._preview.phase(chunk.sequence_id) is not Phase.PREFILLING:
            return Refusal(ShardError.WRONG_POSITION, f"the prompt of sequence {chunk.sequence_id} is complete already")
        return self._check_place(chunk, sequence.computed, sequence.parameters)

    @first_refusal
    def _check_first(self, chunk: Chunk, parameters: PreparedParameters) -> Iterator[Refusal | None]:
        if self._draining:
            yield DRAINING
        start = 0
        if chunk.copy is not None:
            start = chunk.copy.length
            yield self._preview.check_prefix(chunk.copy, parameters.adapter)
        yield check_adapter(parameters.adapter, self._facts)
        yield self._check_parameters(parameters)
        yield self._check_stopping(parameters)
        yield self._check_drafts(parameters)
        yield self._check_thought(parameters.thought)
        yield check_sampling(parameters.sampling, self._facts.vocabulary_size)
        yield self._check_place(chunk, start, parameters)

    def _check_parameters(self, parameters: PreparedParameters) -> Refusal | None:
        if not 1 <= parameters.prompt_length < parameters.max_length:
            return bad_request(
                "prompt_length must be >= 1 and < max_length. "
                f"Given: {parameters.prompt_length} and {parameters.max_length}"
            )
        if parameters.feedback is not None and not abs(parameters.feedback) <= MAX_FEEDBACK:
            return bad_request(f"feedback must be a number up to {MAX_FEEDBACK:g}. Given: {parameters.feedback}")
        if parameters.sampling.processors and parameters.processors is None:
            return bad_request(f"processors {parameters.sampling.processors} are not registered in this process")
        if parameters.traceparent and not _TRACEPARENT.fullmatch(parameters.traceparent):
            return bad_request(
                "traceparent must be that of W3C Trace Context, version 00. "
                f"Given: {parameters.traceparent[:_SHOWN_CHARACTERS]!r}"
            )
        # The last token is sampled and never computed: it needs no cell.
        most = max(limits.cells_per_sequence for limits in self._capacity.layouts) + 1
        if parameters.max_length > most:
            return Refusal(
                ShardError.SEQUENCE_TOO_LONG, f"max_length must be <= {most} here. Given: {parameters.max_length}"
            )
        return None

    def _check_stopping(self, parameters: PreparedParameters) -> Refusal | None:
        stops = parameters.stop_token_ids
        if len(stops) > MAX_STOP_TOKEN_IDS:
            return bad_request(f"there must be <= {MAX_STOP_TOKEN_IDS} stop_token_ids. Given: {len(stops)}")
        if (refusal := self._check_ids("stop_token_ids", stops)) is not None:
            return refusal
        most = parameters.max_length - parameters.prompt_length
        if not 0 <= parameters.min_tokens <= most:
            return bad_request(
                f"min_tokens must be <= max_length - prompt_length, {most}. Given: {parameters.min_tokens}"
            )
        return None

    def _check_drafts(self, parameters: PreparedParameters) -> Refusal | None:
        predicted = parameters.prediction
        most = max(limits.cells_per_sequence for limits in self._capacity.layouts)
        if len(predicted) > most:
            return bad_request(f"there must be <= {most} predicted_token_ids. Given: {len(predicted)}")
        if (refusal := self._check_ids("predicted_token_ids", predicted)) is not None:
            return refusal
        if len(parameters.draft_pool) > _MOST_POOL_BYTES:
            return bad_request(f"draft_pool must have <= {_MOST_POOL_BYTES} bytes. Given: {len(parameters.draft_pool)}")
        return None

    def _check_thought(self, thought: Thought | None) -> Refusal | None:
        if thought is None:
            return None
        if not (0 < len(thought.closings) <= MAX_THOUGHT_CLOSINGS and all(thought.closings)):
            return bad_request(f"reasoning must have 1 to {MAX_THOUGHT_CLOSINGS} closings, none of them empty")
        size = max(map(len, (*thought.closings, thought.opening)))
        if max(size, len(thought.ending)) > MAX_THOUGHT_MARKER:
            return bad_request(
                f"the closings, the opening and the ending of reasoning must be at most {MAX_THOUGHT_MARKER} long"
            )
        if (refusal := self._check_ids("ending_token_ids", thought.ending)) is not None:
            return refusal
        if thought.max_tokens is not None and not thought.ending:
            return bad_request("max_tokens of reasoning needs ending_token_ids")
        return None

    def _check_place(self, chunk: Chunk, held: int, parameters: PreparedParameters) -> Refusal | None:
        """Check that the chunk continues the ``held`` tokens and ends where it may."""
        if chunk.start != held:
            return Refusal(
                ShardError.WRONG_POSITION,
                f"sequence {chunk.sequence_id} continues at {held}. Given: {chunk.start}",
            )
        end = chunk.start + len(chunk.token_ids)
        if end > self._capacity.current.cells_per_sequence:
            return Refusal(
                ShardError.SEQUENCE_TOO_LONG,
                f"a sequence holds {self._capacity.current.cells_per_sequence} tokens. Given: {end}",
            )
        if chunk.media and chunk.start + chunk.media[-1].end > parameters.prompt_length:
            return bad_request(f"media must lie within the prompt of {parameters.prompt_length} tokens")
        if end >= parameters.max_length:
            return bad_request(
                f"the chunks must leave room below max_length {parameters.max_length}. Given: {end} tokens"
            )
        if chunk.last and end < parameters.prompt_length:
            return bad_request(f"the prompt has {parameters.prompt_length} tokens and its last chunk ends at {end}")
        return None


class RowCheck(_StepCheck):
    """Checks the rows of an Evaluate."""

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
            yield DRAINING
        yield check_adapter(row.adapter, self._facts)
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
