"""Checks a command against what the shard holds, before anything changes. Trusts nobody: every number is in range.

The checks see the sequences as they will be after the command's releases.
"""

import math
from collections.abc import Mapping, Sequence

from caravan_proto.errors import ShardError
from caravan_shard.backends.base import Capacity, PrefixSharing
from caravan_shard.commands import Chunk, Decode, FilterBatch, Prefill, PrefixCopy
from caravan_shard.parameters import SamplingParameters, SequenceParameters
from caravan_shard.results import Refusal
from caravan_shard.sequences import Phase
from caravan_shard.sequences import Sequence as ShardSequence

MAX_TOP_N_TOKENS = 32
_MAX_INT32 = 2**31 - 1
_MAX_UINT64 = 2**64 - 1


def _bad(sentence: str) -> Refusal:
    return Refusal(ShardError.BAD_REQUEST, sentence)


def check_sampling(sampling: SamplingParameters, vocabulary_size: int) -> Refusal | None:
    """Every value in its range."""
    finite = {
        "temperature": sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
    }
    for name, value in finite.items():
        if not math.isfinite(value):
            return _bad(f"{name} must be finite. Given: {value}")
    for name, value in {"top_p": sampling.top_p, "typical_p": sampling.typical_p}.items():
        if not 0.0 < value <= 1.0:
            return _bad(f"{name} must be > 0 and <= 1. Given: {value}")
    if sampling.temperature < 0.0:
        return _bad(f"temperature must be >= 0. Given: {sampling.temperature}")
    if not 0.0 <= sampling.min_p <= 1.0:
        return _bad(f"min_p must be >= 0 and <= 1. Given: {sampling.min_p}")
    if sampling.repetition_penalty <= 0.0:
        return _bad(f"repetition_penalty must be > 0. Given: {sampling.repetition_penalty}")
    if not 0 <= sampling.top_k <= _MAX_INT32:
        return _bad(f"top_k must be <= {_MAX_INT32}. Given: {sampling.top_k}")
    if not 0 <= sampling.seed <= _MAX_UINT64:
        return _bad(f"seed must be < 2^64. Given: {sampling.seed}")
    most = min(MAX_TOP_N_TOKENS, vocabulary_size)
    if not 0 <= sampling.top_n_tokens <= most:
        return _bad(f"top_n_tokens must be <= {most}. Given: {sampling.top_n_tokens}")
    if sampling.top_n_tokens and not sampling.logprobs:
        return _bad("top_n_tokens needs logprobs")
    return None


class CommandCheck:
    """Checks one command. ``held`` is left as it is."""

    def __init__(
        self,
        held: Mapping[int, ShardSequence],
        capacity: Capacity,
        vocabulary_size: int,
        *,
        draining: bool,
    ) -> None:
        self._held = held
        self._capacity = capacity
        self._vocabulary_size = vocabulary_size
        self._draining = draining
        self._released: frozenset[int] = frozenset()

    def prefill(self, command: Prefill) -> Refusal | None:
        """One pass with prompt chunks."""
        chunk_ids = [chunk.sequence_id for chunk in command.chunks]
        refusal = self._release(command.release_ids) or self._distinct([*chunk_ids, *command.rider_ids])
        for chunk in command.chunks:
            refusal = refusal or self._chunk(chunk)
        refusal = refusal or self._advance(command.rider_ids)
        return refusal or self._pass_size(sum(len(chunk.tokens) for chunk in command.chunks), command.rider_ids)

    def decode(self, command: Decode) -> Refusal | None:
        """Passes without prompt chunks."""
        refusal = self._release(command.release_ids) or self._distinct(command.sequence_ids)
        if refusal is None and command.max_steps < 1:
            return _bad("max_steps must be >= 1")
        return refusal or self._advance(command.sequence_ids) or self._pass_size(0, command.sequence_ids)

    def filter_batch(self, command: FilterBatch) -> Refusal | None:
        """Sequences to keep."""
        return self._release(command.release_ids) or self._distinct(command.keep_ids) or self._known(command.keep_ids)

    def _find(self, sequence_id: int) -> ShardSequence | None:
        return None if sequence_id in self._released else self._held.get(sequence_id)

    def _release(self, sequence_ids: Sequence[int]) -> Refusal | None:
        refusal = self._distinct(sequence_ids) or self._known(sequence_ids)
        if refusal is None:
            self._released = frozenset(sequence_ids)
        return refusal

    def _distinct(self, sequence_ids: Sequence[int]) -> Refusal | None:
        seen: set[int] = set()
        for sequence_id in sequence_ids:
            if not 0 <= sequence_id < self._capacity.max_sequences:
                return _bad(f"sequence ids must be < {self._capacity.max_sequences}. Given: {sequence_id}")
            if sequence_id in seen:
                return _bad(f"sequence {sequence_id} is listed twice")
            seen.add(sequence_id)
        return None

    def _known(self, sequence_ids: Sequence[int]) -> Refusal | None:
        for sequence_id in sequence_ids:
            if self._find(sequence_id) is None:
                return Refusal(ShardError.UNKNOWN_SEQUENCE, f"sequence {sequence_id} is not held here")
        return None

    def _advance(self, sequence_ids: Sequence[int]) -> Refusal | None:
        refusal = self._known(sequence_ids)
        if refusal is not None:
            return refusal
        for sequence_id in sequence_ids:
            if self._held[sequence_id].phase is Phase.PREFILLING:
                return Refusal(ShardError.NOT_PREFILLED, f"the prompt of sequence {sequence_id} is not complete")
        return None

    def _pass_size(self, chunk_tokens: int, sequence_ids: Sequence[int]) -> Refusal | None:
        advancing = sum(self._held[sequence_id].phase is Phase.RUNNING for sequence_id in sequence_ids)
        most = self._capacity.max_batch_tokens
        if chunk_tokens + advancing > most:
            return Refusal(
                ShardError.TOO_MANY_TOKENS,
                f"a pass takes {most} tokens. Given: {chunk_tokens} of prompts and {advancing} decoding",
            )
        return None

    def _chunk(self, chunk: Chunk) -> Refusal | None:
        if not chunk.tokens:
            return _bad(f"the chunk of sequence {chunk.sequence_id} is empty")
        if min(chunk.tokens) < 0 or max(chunk.tokens) >= self._vocabulary_size:
            return _bad(f"token ids must be < {self._vocabulary_size}. Given: {max(chunk.tokens)}")
        sequence = self._find(chunk.sequence_id)
        if sequence is None:
            return self._first_chunk(chunk)
        if chunk.parameters is not None or chunk.copy is not None:
            return Refusal(ShardError.SEQUENCE_EXISTS, f"sequence {chunk.sequence_id} has begun already")
        if sequence.phase is not Phase.PREFILLING:
            return Refusal(ShardError.WRONG_POSITION, f"the prompt of sequence {chunk.sequence_id} is complete already")
        return self._place(chunk, sequence.computed, sequence.parameters)

    def _first_chunk(self, chunk: Chunk) -> Refusal | None:
        if chunk.parameters is None:
            return Refusal(
                ShardError.UNKNOWN_SEQUENCE,
                f"sequence {chunk.sequence_id} is not held here and comes without parameters",
            )
        if self._draining:
            return Refusal(ShardError.DRAINING, "this shard is shutting down and takes no new sequence")
        start = 0
        if chunk.copy is not None:
            start = chunk.copy.length
            refusal = self._copy(chunk.copy)
            if refusal is not None:
                return refusal
        return (
            self._parameters(chunk.parameters)
            or check_sampling(chunk.parameters.sampling, self._vocabulary_size)
            or self._place(chunk, start, chunk.parameters)
        )

    def _copy(self, copy: PrefixCopy) -> Refusal | None:
        source = self._find(copy.source_id)
        if source is None:
            return Refusal(ShardError.UNKNOWN_SEQUENCE, f"sequence {copy.source_id} is not held here")
        if copy.length < 1:
            return _bad("a copied prefix must have >= 1 token")
        if copy.length > source.computed:
            return Refusal(
                ShardError.WRONG_POSITION,
                f"sequence {copy.source_id} holds {source.computed} tokens, not {copy.length}",
            )
        if self._capacity.sharing is PrefixSharing.WHOLE_ONLY and copy.length != source.computed:
            return Refusal(
                ShardError.WRONG_POSITION,
                f"this model shares only whole sequences: {source.computed} tokens. Given: {copy.length}",
            )
        return None

    def _parameters(self, parameters: SequenceParameters) -> Refusal | None:
        if not 1 <= parameters.prompt_length < parameters.max_length:
            return _bad(
                "prompt_length must be >= 1 and < max_length. "
                f"Given: {parameters.prompt_length} and {parameters.max_length}"
            )
        # The last token is sampled and never computed: it needs no cell.
        most = self._capacity.cells_per_sequence + 1
        if parameters.max_length > most:
            return Refusal(
                ShardError.SEQUENCE_TOO_LONG, f"max_length must be <= {most} here. Given: {parameters.max_length}"
            )
        return None

    def _place(self, chunk: Chunk, held: int, parameters: SequenceParameters) -> Refusal | None:
        if chunk.start != held:
            return Refusal(
                ShardError.WRONG_POSITION,
                f"sequence {chunk.sequence_id} goes on at {held}. Given: {chunk.start}",
            )
        end = chunk.start + len(chunk.tokens)
        if end > self._capacity.cells_per_sequence:
            return Refusal(
                ShardError.SEQUENCE_TOO_LONG,
                f"a sequence holds {self._capacity.cells_per_sequence} tokens. Given: {end}",
            )
        if end >= parameters.max_length:
            return _bad(f"the chunks must leave room below max_length {parameters.max_length}. Given: {end} tokens")
        if chunk.last and end < parameters.prompt_length:
            return _bad(f"the prompt has {parameters.prompt_length} tokens and its last chunk ends at {end}")
        return None
