"""Checks a command against what the shard will hold after the command's header, before anything changes."""

from collections.abc import Iterator, Mapping, Sequence

from caravan_proto.errors import ShardError
from caravan_shard.backends.base import Capacity, ModelFacts, Prefix, Saving
from caravan_shard.checks.chunk import ChunkCheck
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.checks.preview import Preview
from caravan_shard.protocol.commands import Decode, FilterBatch, Prefill, SwapIn, SwapInEntry, SwapOut, SwapOutEntry
from caravan_shard.protocol.results import Refusal, bad_request
from caravan_shard.sequences.sequence import Phase
from caravan_shard.sequences.sequence import Sequence as ShardSequence
from caravan_shard.sequences.swap import SwapSpace


class CommandCheck:
    """Checks one command. ``held`` and ``swap`` stay as they are."""

    def __init__(self, held: Mapping[int, ShardSequence], swap: SwapSpace, capacity: Capacity) -> None:
        self._swap = swap
        self._capacity = capacity
        self._preview = Preview(held, capacity)

    @first_refusal
    def prefill(self, command: Prefill, *, facts: ModelFacts, draining: bool) -> Iterator[Refusal | None]:
        """Check a Prefill; ``draining`` refuses new sequences."""
        yield self._preview.check_header(command.header)
        yield self._preview.check_distinct([*(chunk.sequence_id for chunk in command.chunks), *command.rider_ids])
        check = ChunkCheck(self._preview, self._capacity, facts, draining=draining)
        for chunk in command.chunks:
            yield check(chunk)
        yield self._check_complete(command.rider_ids)
        yield self._check_step_size(sum(len(chunk.tokens) for chunk in command.chunks), command.rider_ids)
        parameters = [chunk.parameters or self._preview.parameters(chunk.sequence_id) for chunk in command.chunks]
        pairs = zip(parameters, command.chunks, strict=True)
        yield self._check_prompt_logprobs(
            sum(known.prompt_logprob_count(chunk.start, len(chunk.tokens)) for known, chunk in pairs)
        )
        yield self._check_one_adapter({known.adapter for known in parameters}, command.rider_ids)

    @first_refusal
    def decode(self, command: Decode) -> Iterator[Refusal | None]:
        """Check a Decode."""
        yield self._preview.check_header(command.header)
        yield self._preview.check_distinct(command.sequence_ids)
        if command.max_steps < 1:
            yield bad_request("max_steps must be >= 1")
        yield self._check_complete(command.sequence_ids)
        yield self._check_step_size(0, command.sequence_ids)
        yield self._check_one_adapter(set(), command.sequence_ids)

    @first_refusal
    def filter_batch(self, command: FilterBatch) -> Iterator[Refusal | None]:
        """Check a FilterBatch."""
        yield self._preview.check_header(command.header)
        yield self._preview.check_listed(command.keep_ids)

    @first_refusal
    def swap_out(self, command: SwapOut) -> Iterator[Refusal | None]:
        """Check a SwapOut."""
        yield self._preview.check_header(command.header)
        yield self._preview.check_listed([entry.sequence_id for entry in command.entries])
        yield self._preview.check_handles([entry.handle for entry in command.entries])
        for entry in command.entries:
            yield self._check_save(entry)

    @first_refusal
    def swap_in(self, command: SwapIn) -> Iterator[Refusal | None]:
        """Check a SwapIn."""
        yield self._preview.check_header(command.header)
        yield self._preview.check_distinct([entry.sequence_id for entry in command.entries])
        yield self._preview.check_handles([entry.handle for entry in command.entries])
        for entry in command.entries:
            yield self._check_restore(entry)

    def _check_complete(self, sequence_ids: Sequence[int]) -> Refusal | None:
        """Check that the sequences are held and that their prompts are complete."""
        refusal = self._preview.check_known(sequence_ids)
        if refusal is not None:
            return refusal
        for sequence_id in sequence_ids:
            if self._preview.phase(sequence_id) is Phase.PREFILLING:
                return Refusal(ShardError.NOT_PREFILLED, f"the prompt of sequence {sequence_id} is not complete")
        return None

    def _check_step_size(self, chunk_tokens: int, sequence_ids: Sequence[int]) -> Refusal | None:
        advancing = sum(self._preview.phase(sequence_id) is Phase.RUNNING for sequence_id in sequence_ids)
        most = self._capacity.max_batch_tokens
        if chunk_tokens + advancing > most:
            return Refusal(
                ShardError.TOO_MANY_TOKENS,
                f"a step takes {most} tokens. Given: {chunk_tokens} of prompts and {advancing} decoding",
            )
        return None

    def _check_prompt_logprobs(self, tokens: int) -> Refusal | None:
        most = self._capacity.max_prompt_logprob_tokens
        if tokens > most:
            return Refusal(
                ShardError.TOO_MANY_TOKENS, f"a step returns prompt_logprobs of {most} tokens. Given: {tokens}"
            )
        return None

    def _check_one_adapter(self, adapters: set[str], sequence_ids: Sequence[int]) -> Refusal | None:
        """Check that all have the same adapter: llama.cpp applies one to the whole batch."""
        adapters = adapters | {self._preview.parameters(sequence_id).adapter for sequence_id in sequence_ids}
        if len(adapters) > 1:
            names = ", ".join(repr(name) for name in sorted(adapters))
            return bad_request(f"all sequences of a step must have the same adapter. Given: {names}")
        return None

    def _check_save(self, entry: SwapOutEntry) -> Refusal | None:
        if entry.handle in self._swap and self._preview.keeps_handle(entry.handle):
            return bad_request(f"handle {entry.handle} is in use")
        if entry.start != 0 and self._capacity.saving is not Saving.SUFFIXES:
            return bad_request(f"this shard saves only whole sequences: start must be 0. Given: {entry.start}")
        computed = self._preview.length(entry.sequence_id)
        if not 0 <= entry.start <= computed:
            return Refusal(
                ShardError.WRONG_POSITION,
                f"sequence {entry.sequence_id} holds {computed} tokens; start must not be above. Given: {entry.start}",
            )
        return None

    def _check_restore(self, entry: SwapInEntry) -> Refusal | None:
        if self._preview.find(entry.sequence_id) is not None:
            return Refusal(ShardError.SEQUENCE_EXISTS, f"sequence {entry.sequence_id} is held already")
        swapped = self._swap.peek(entry.handle) if self._preview.keeps_handle(entry.handle) else None
        adapter = swapped.sequence.parameters.adapter if swapped is not None else None
        refusal = self._preview.check_prefix(entry.copy, adapter) if entry.copy is not None else None
        if refusal is not None or swapped is None:
            return refusal
        given = entry.copy.length if entry.copy is not None else 0
        if given != swapped.start:
            return bad_request(f"handle {entry.handle} was saved from position {swapped.start} on. Given: {given}")
        if entry.copy is not None and not self._same_tokens(entry.copy, swapped.sequence):
            return bad_request(f"sequence {entry.copy.source_id} does not begin like that of handle {entry.handle}")
        return None

    def _same_tokens(self, prefix: Prefix, sequence: ShardSequence) -> bool:
        source = self._preview.find(prefix.source_id)
        assert source is not None
        return source.tokens[: prefix.length] == sequence.tokens[: prefix.length]
