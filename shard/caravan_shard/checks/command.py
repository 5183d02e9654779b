"""Checks a command against what the shard will hold after the command's header, before anything changes."""

from collections.abc import Iterator, Mapping, Sequence

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Decode, Evaluate, FilterBatch, Load, Prefill, RowOutputs, Save, SetLayout
from caravan_proto.messages.model import ModelFile
from caravan_shard.backends.base import Capacity
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.checks.media import FoundMedia, MediaCheck
from caravan_shard.checks.preview import Preview
from caravan_shard.checks.runs import LoadCheck, SaveCheck
from caravan_shard.checks.step import DRAINING, ChunkCheck, RowCheck
from caravan_shard.protocol.results import Refusal, bad_request
from caravan_shard.sequences.runs import RunStore
from caravan_shard.sequences.sequence import Phase
from caravan_shard.sequences.sequence import Sequence as ShardSequence


class CommandCheck:
    """Checks one command. ``held`` and ``runs`` stay as they are."""

    def __init__(self, held: Mapping[int, ShardSequence], runs: RunStore, capacity: Capacity) -> None:
        self._runs = runs
        self._capacity = capacity
        self._preview = Preview(held, capacity)

    @first_refusal
    def prefill(
        self, command: Prefill, *, facts: ModelFile, media: FoundMedia, draining: bool
    ) -> Iterator[Refusal | None]:
        """Check a Prefill; ``draining`` refuses new sequences. ``media``: what is here of those that it names."""
        yield self._preview.check_header(command.header)
        yield self._preview.check_distinct([*(chunk.sequence_id for chunk in command.chunks), *command.ride])
        check = ChunkCheck(self._preview, self._capacity, facts, MediaCheck(facts.media, media), draining=draining)
        for chunk in command.chunks:
            yield check(chunk)
        yield self._check_complete(command.ride)
        yield self._check_step_size(sum(len(chunk.token_ids) for chunk in command.chunks), command.ride)
        parameters = [chunk.setup or self._preview.parameters(chunk.sequence_id) for chunk in command.chunks]
        pairs = zip(parameters, command.chunks, strict=True)
        prompt_logprobs = sum(known.prompt_logprob_count(chunk.start, len(chunk.token_ids)) for known, chunk in pairs)
        yield self._check_output_budget(prompt_logprobs, "prompt_logprobs")
        yield self._check_one_adapter({known.adapter for known in parameters}, command.ride)

    @first_refusal
    def evaluate(
        self, command: Evaluate, *, facts: ModelFile, media: FoundMedia, draining: bool
    ) -> Iterator[Refusal | None]:
        """Check an Evaluate; ``draining`` refuses sequences that start from nothing. ``media``: as for a Prefill."""
        yield self._preview.check_header(command.header)
        yield self._preview.check_distinct([row.sequence_id for row in command.rows])
        check = RowCheck(self._preview, self._capacity, facts, MediaCheck(facts.media, media), draining=draining)
        for row in command.rows:
            yield check(row)
        yield self._check_step_size(sum(len(row.token_ids) for row in command.rows), ())
        outputs = sum(len(row.token_ids) for row in command.rows if row.outputs is RowOutputs.ALL)
        yield self._check_output_budget(outputs, "outputs")
        yield self._check_one_adapter({row.adapter for row in command.rows}, ())

    @first_refusal
    def decode(self, command: Decode) -> Iterator[Refusal | None]:
        """Check a Decode."""
        yield self._preview.check_header(command.header)
        yield self._preview.check_distinct(command.sequence_ids)
        if command.max_steps < 1:
            yield bad_request("max_steps must be >= 1")
        yield self._check_complete(command.sequence_ids)
        yield self._check_step_size(0, command.sequence_ids)
        yield self._check_drafts(command)
        yield self._check_one_adapter(set(), command.sequence_ids)

    @first_refusal
    def filter_batch(self, command: FilterBatch) -> Iterator[Refusal | None]:
        """Check a FilterBatch."""
        yield self._preview.check_header(command.header)
        yield self._preview.check_listed(command.keep)

    @first_refusal
    def save(self, command: Save) -> Iterator[Refusal | None]:
        """Check a Save."""
        yield self._preview.check_header(command.header)
        yield from SaveCheck(self._preview, self._capacity.current.saving)(command.entries)

    @first_refusal
    def load(self, command: Load, *, facts: ModelFile, draining: bool) -> Iterator[Refusal | None]:
        """Check a Load; ``draining`` refuses it."""
        yield self._preview.check_header(command.header)
        if draining:
            yield DRAINING
        yield self._preview.check_distinct([entry.sequence_id for entry in command.entries])
        check = LoadCheck(self._preview, self._runs, self._capacity.current, facts)
        for entry in command.entries:
            yield check(entry)

    @first_refusal
    def set_layout(self, command: SetLayout) -> Iterator[Refusal | None]:
        """Check a SetLayout."""
        yield self._preview.check_header(command.header)
        limits = None if command.layout is None else self._capacity.limits(command.layout)
        if limits is None:
            possible = ", ".join(limits.layout.value for limits in self._capacity.layouts)
            yield bad_request(f"the layouts of this shard are: {possible}")
            return
        for sequence_id in self._preview.held_ids():
            length = self._preview.length(sequence_id)
            if length > limits.cells_per_sequence:
                yield Refusal(
                    ShardError.SEQUENCE_TOO_LONG,
                    f"a sequence holds {limits.cells_per_sequence} tokens in the layout {limits.layout.value}; "
                    f"sequence {sequence_id} has {length}",
                )

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
                f"a step takes {most} tokens. Given: {chunk_tokens} in chunks or rows, and {advancing} decoding",
            )
        return None

    def _check_drafts(self, command: Decode) -> Refusal | None:
        advancing = sum(self._preview.phase(sequence_id) is Phase.RUNNING for sequence_id in command.sequence_ids)
        most = min(self._capacity.max_draft_tokens, self._capacity.max_batch_tokens - advancing)
        if command.max_draft_tokens > most:
            return Refusal(
                ShardError.TOO_MANY_TOKENS,
                f"a step takes {most} draft tokens beside {advancing} sequences. Given: {command.max_draft_tokens}",
            )
        return None

    def _check_output_budget(self, tokens: int, name: str) -> Refusal | None:
        most = self._capacity.max_prompt_logprob_tokens
        if tokens > most:
            return Refusal(ShardError.TOO_MANY_TOKENS, f"a step returns {name} of {most} tokens. Given: {tokens}")
        return None

    def _check_one_adapter(self, adapters: set[str], sequence_ids: Sequence[int]) -> Refusal | None:
        """Check that all have the same adapter: llama.cpp applies one to the whole batch."""
        adapters = adapters | {self._preview.parameters(sequence_id).adapter for sequence_id in sequence_ids}
        if len(adapters) > 1:
            names = ", ".join(repr(name) for name in sorted(adapters))
            return bad_request(f"all sequences of a step must have the same adapter. Given: {names}")
        return None
