"""The next command of one shard while it is being planned."""

from caravan_router.scheduling.actions import Chunk, Command, Decode, FilterBatch, Prefill
from caravan_router.scheduling.policy import PrefillMode, SchedulerConfig, chunk_budget, join_reason, pass_seconds
from caravan_router.scheduling.sequence import Resident, Sequence
from caravan_router.scheduling.shard_state import InFlight, ShardState


class Draft:
    """Collects what the next pass of ``shard`` carries, within its token budget; ``finish`` turns it into a command.

    Prompts already begun come first, in order of arrival; what is left of the budget admits waiting requests.
    """

    def __init__(self, shard: ShardState, config: SchedulerConfig, waiting: int) -> None:
        self.shard = shard
        self._config = config
        self._chunks: list[tuple[Resident, int]] = []
        self._riders = shard.decoding
        self._joins_others = False
        self._join_reason = join_reason(
            config, waiting=waiting, running=len(self._riders), steps_since_prefill=shard.steps_since_prefill
        )
        if config.mode is PrefillMode.PAUSE and (shard.prefilling or self._join_reason):
            self._riders = []  # decodes wait
        self._budget = self._token_budget(prompts=len(shard.prefilling) + min(waiting, shard.free_sequences))
        for resident in shard.prefilling:
            self._add_chunk(resident)

    def _token_budget(self, prompts: int) -> int:
        shard, riders = self.shard, len(self._riders)
        cost = shard.mixed_cost if riders else shard.idle_cost
        seconds = pass_seconds(self._config, prompts=prompts, riders=riders)
        budget = chunk_budget(self._config, tokens_within_target=cost.tokens_within(seconds), riders=riders)
        return min(budget, shard.limits.max_batch_tokens - riders)

    def _add_chunk(self, resident: Resident) -> None:
        tokens = min(self._budget, resident.target - resident.computed)
        if tokens > 0:
            self._budget -= tokens
            self._chunks.append((resident, tokens))

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` could start in this very pass."""
        return self._join_reason is not None and self._budget > 0 and self.shard.can_hold(sequence)

    def admit(self, sequence: Sequence) -> Resident:
        """Place ``sequence`` and start its prompt; ``can_admit`` was asked."""
        self._joins_others = self._joins_others or bool(self.shard.decoding)
        resident = self.shard.place(sequence)
        self._add_chunk(resident)
        return resident

    def finish(self, command_id: int) -> Command | None:
        """The command, recorded as in flight; None if the shard should go on as it is."""
        shard = self.shard
        if self._chunks:
            return self._prefill(command_id)
        if shard.in_flight and not shard.release_now:
            return None  # a Decode is running and nothing is to change
        if shard.residents:
            return self._decode(command_id)
        if shard.releasing:
            self._record(command_id, is_decode=False, residents=[])
            shard.take_releases()
            return FilterBatch(shard=shard.name, command_id=command_id, keep=())
        return None

    def _prefill(self, command_id: int) -> Prefill:
        shard = self.shard
        chunks = tuple(_chunk(resident, tokens) for resident, tokens in self._chunks)
        carried = [resident for resident, _ in self._chunks] + self._riders
        prompt_tokens = {resident.sequence_id: tokens for resident, tokens in self._chunks}
        self._record(command_id, is_decode=False, residents=carried, chunk_tokens=prompt_tokens)
        shard.steps_since_prefill = 0
        return Prefill(
            shard=shard.name,
            command_id=command_id,
            release=shard.take_releases(),
            chunks=chunks,
            ride=tuple(resident.sequence_id for resident in self._riders),
            joins=self._join_reason if self._joins_others else None,
        )

    def _decode(self, command_id: int) -> Decode:
        shard = self.shard
        residents = shard.decoding
        self._record(command_id, is_decode=True, residents=residents)
        return Decode(
            shard=shard.name,
            command_id=command_id,
            release=shard.take_releases(),
            sequence_ids=tuple(resident.sequence_id for resident in residents),
            max_steps=self._config.run_ahead_steps,
        )

    def _record(
        self,
        command_id: int,
        *,
        is_decode: bool,
        residents: list[Resident],
        chunk_tokens: dict[int, int] | None = None,
    ) -> None:
        self.shard.in_flight.append(
            InFlight(
                command_id=command_id,
                is_decode=is_decode,
                residents={resident.sequence_id: resident for resident in residents},
                chunk_tokens=chunk_tokens or {},
            )
        )


def _chunk(resident: Resident, tokens: int) -> Chunk:
    start, stop = resident.computed, resident.computed + tokens
    return Chunk(
        sequence_id=resident.sequence_id,
        start=start,
        token_ids=resident.sequence.tokens(start, stop),
        last=stop == resident.target,
        setup=resident.sequence.request if start == 0 else None,
    )
