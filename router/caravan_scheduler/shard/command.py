"""The commands of a shard that are under way, what the next one does first, and what both say of whose turn is next."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from caravan_proto.messages.commands import Command, Decode, Evaluate, Header, Prefill
from caravan_scheduler.shard.costs import ShardCosts
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.shard.stays import Stays

# Steps in a row while another adapter is wanted. Switching costs part of a step; a longer turn makes the others wait.
TURN_STEPS = 8
# A Decode that must yield has seldom run more than this many steps beyond those reported. If it has, the shard reports
# that its cache is full, and nothing is lost.
UNSEEN_STEPS = 4


class AdapterTurn:
    """``adapter`` is that of the last step; empty for none."""

    def __init__(self) -> None:
        self.adapter = ""
        self._steps = 0
        # Least recently used first.
        self._used: dict[str, None] = {}

    @property
    def is_over(self) -> bool:
        """Whether another adapter goes next, if one is wanted."""
        return self._steps >= TURN_STEPS

    def steps_left(self, adapter: str) -> int:
        """Return how many steps ``adapter`` has in a row if it goes next."""
        return TURN_STEPS if adapter != self.adapter or self.is_over else TURN_STEPS - self._steps

    def next(self, wanted: Collection[str]) -> str:
        """Return the one of ``wanted`` whose turn it is, else the one whose last turn is longest ago."""
        if not wanted or wanted == {self.adapter} or (self.adapter in wanted and not self.is_over):
            return self.adapter
        places = {adapter: place for place, adapter in enumerate(self._used)}
        # The adapter whose turn is over is the last of those used.
        return min(wanted, key=lambda adapter: (places.get(adapter, -1), adapter))

    def take(self, adapter: str) -> None:
        """Note that a command with ``adapter`` is sent. A turn begins if it was another's or this one's is over."""
        if adapter != self.adapter or self.is_over:
            self.adapter, self._steps = adapter, 0
        self._used.pop(adapter, None)
        self._used[adapter] = None

    def count_step(self) -> bool:
        """Note that a step ended. Return whether the turn ended with it."""
        self._steps += 1
        return self._steps == TURN_STEPS


class InFlight:
    """A command under way.

    ``residents``: those the command names, by sequence id. An id may belong to another before late results arrive.
    ``chunk_tokens``: tokens of chunks and rows, by sequence id. ``steps_left``: steps not reported yet.
    ``starting``: those whose first chunk or row it carries.
    ``drafts``: most draft tokens of a step. ``cells_left``: what a Decode may take beyond what was reported, in all.
    """

    __slots__ = ("_live", "cells_left", "chunk_tokens", "command", "drafts", "residents", "starting", "steps_left")

    def __init__(self, command: Command, residents: Iterable[Resident]) -> None:
        self.command = command
        self.residents = {resident.sequence_id: resident for resident in residents}
        self.chunk_tokens: dict[int, int] = {}
        self.steps_left = 0
        self.drafts = self.cells_left = 0
        self.starting: Sequence[Resident] = ()
        # How many of the residents are live, and the version of the stays in which they were counted.
        self._live = 0, -1
        if isinstance(command, Prefill):
            self.chunk_tokens = {chunk.sequence_id: len(chunk.token_ids) for chunk in command.chunks}
            self.starting = [self.residents[chunk.sequence_id] for chunk in command.chunks if chunk.setup is not None]
            self.steps_left = 1
        elif isinstance(command, Evaluate):
            self.chunk_tokens = {row.sequence_id: len(row.token_ids) for row in command.rows}
            self.starting = [resident for resident in self.residents.values() if not resident.is_running]
            self.steps_left = 1
        elif isinstance(command, Decode):
            self.steps_left = command.max_steps
            self.drafts = command.max_draft_tokens
            self.cells_left = len(self.residents) * command.max_steps

    @property
    def is_decode(self) -> bool:
        """Whether it yields to the next command: only a Decode does."""
        return isinstance(self.command, Decode)

    @property
    def coming_cells(self) -> int:
        """Cells that its decodes may take before the next command runs."""
        if self.drafts:
            return min(self.cells_left, (len(self.residents) + self.drafts) * UNSEEN_STEPS) if self.steps_left else 0
        return (len(self.residents) - len(self.chunk_tokens)) * min(self.steps_left, UNSEEN_STEPS)

    def live(self, version: int) -> int:
        """Return how many of the residents are live. ``version``: that of the stays, with which this may change."""
        count, counted_in = self._live
        if version != counted_in:
            count = sum([one.status.is_live for one in self.residents.values()])
            self._live = count, version
        return count

    def unseen_tokens(self, resident: Resident) -> int:
        """Return how many tokens of ``resident`` may be under way: those of its chunk, or of steps not reported yet."""
        chunk = self.chunk_tokens.get(resident.sequence_id)
        if chunk is not None:
            return chunk
        return UNSEEN_STEPS * (1 + min(self.drafts, resident.sequence.spec.max_draft_tokens))

    def end_step(self, tokens: int) -> None:
        """Note that a step of it succeeded, which sampled ``tokens``."""
        self.steps_left -= 1
        if not self.chunk_tokens:
            self.cells_left -= tokens

    def fail(self) -> None:
        """Note that its step changed nothing."""
        self.chunk_tokens = {}
        self.steps_left = 0

    def completes_prefill(self, prefilling: Iterable[Resident]) -> bool:
        """Whether no prompt of ``prefilling`` is left to compute after it."""
        if not self.chunk_tokens:
            return False
        chunk_tokens = self.chunk_tokens if self.steps_left else {}  # else they are computed
        return all(
            resident.computed + chunk_tokens.get(resident.sequence_id, 0) >= resident.target for resident in prefilling
        )


class ShardCommands:
    """``in_flight``: commands that were sent and have not ended: at most a Decode and its successor.

    ``turn``: which adapter goes next. ``evaluated_last``: whether the last step was of beam searches, which take turns
    with all others. ``busy_until_s``: when the command under way is expected to end, unless it is a Decode; in seconds
    on the scheduler's clock. ``stepped_s``: when the last step ended, on that clock.
    """

    def __init__(self, stays: Stays, costs: ShardCosts) -> None:
        self._stays = stays
        self._costs = costs
        self.in_flight: tuple[InFlight, ...] = ()
        self.turn = AdapterTurn()
        self.steps_since_prefill = 0
        self.evaluated_last = False
        self.busy_until_s = -math.inf
        self.stepped_s = -math.inf

    @property
    def can_begin(self) -> bool:
        """Whether nothing is under way, or a lone Decode, which yields to the next command."""
        return not self.in_flight or (len(self.in_flight) == 1 and self.in_flight[0].is_decode)

    @property
    def completes_prefill(self) -> bool:
        """Whether a Prefill is under way after which no prompt is left to compute."""
        return bool(self.in_flight) and self.in_flight[-1].completes_prefill(self._stays.prefilling)

    @property
    def positions_under_way(self) -> dict[int, range]:
        """The positions of each sequence that the current step may be computing, by sequence id."""
        step = next((command for command in self.in_flight if command.steps_left), None)
        if step is None:
            return {}
        return {
            sequence_id: range(resident.computed, resident.computed + step.unseen_tokens(resident))
            for sequence_id, resident in step.residents.items()
            if resident is self._stays.residents.get(sequence_id)
        }

    def find(self, command_id: int) -> InFlight | None:
        """Return the command under way with this id, if there is one."""
        return next((one for one in self.in_flight if one.command.command_id == command_id), None)

    # Changes, which the ledger makes

    def begin(self, command: Command, residents: Iterable[Resident], now_s: float) -> None:
        """Note that ``command``, which names ``residents``, is under way."""
        sent = InFlight(command, residents)
        self.in_flight = (*self.in_flight, sent)
        if isinstance(command, Prefill):
            self.steps_since_prefill = 0
        if isinstance(command, Prefill | Evaluate):
            self.busy_until_s = now_s + self._expected_s(sent)
        if isinstance(command, Prefill | Decode | Evaluate):
            self.evaluated_last = isinstance(command, Evaluate)
            self.turn.take(next(iter(sent.residents.values())).adapter)

    def _expected_s(self, prefill: InFlight) -> float:
        """Return how many seconds a Prefill should take."""
        chunks = prefill.chunk_tokens
        tokens = sum(chunks.values())
        context = sum(prefill.residents[key].computed for key in chunks) // len(chunks)
        return self._costs.seconds(tokens, riders=len(prefill.residents) - len(chunks), context=context)

    def end(self, command: InFlight) -> None:
        """Note that no more replies come for ``command``."""
        assert command in self.in_flight, f"{command.command} is not under way"
        self.in_flight = tuple(one for one in self.in_flight if one is not command)

    def note_step(self, now_s: float) -> None:
        """Note that a step has ended now."""
        self.stepped_s = now_s

    def end_step(self, command: InFlight, seconds: float, *, tokens: int, drafted: int) -> bool:
        """Learn from a successful step, before what it computed is counted. Return whether an adapter's turn ended.

        ``tokens``: how many it sampled. ``drafted``: how many draft tokens it computed.
        """
        chunk_tokens = command.chunk_tokens
        self._costs.observe_step(seconds)
        if not chunk_tokens:
            self.steps_since_prefill += 1
            self._costs.observe_decodes(command.live(self._stays.version) + drafted, seconds)
        elif isinstance(command.command, Evaluate) and sum(chunk_tokens.values()) == len(chunk_tokens):
            self._costs.observe_decodes(len(chunk_tokens), seconds)
        else:
            all_tokens = sum(chunk_tokens.values())
            pairs = sum(count * command.residents[key].computed for key, count in chunk_tokens.items())
            riders = len(command.residents) - len(chunk_tokens)
            self._costs.observe_chunks(all_tokens, pairs / all_tokens, riders=riders, seconds=seconds)
        command.end_step(tokens)
        return self.turn.count_step()


class NextHeader:
    """It releases what leaves, and also:

    ``recycled``: ids that were released and already given to others. ``parked``: lengths to which ended sequences are
    cut back, by id. ``dropped_runs``, ``spilled_runs``: keys of saved runs that are given up, or move to disk.

    ``sources``: sequences from which the next command copies: they must not be evicted before it is sent. ``spared``:
    parked ones that are kept for others than the one that starts, and make way for it last.
    ``is_urgent``: the shard should get a command at once: it computes for a client that is gone, or its cache is full.
    """

    def __init__(self, stays: Stays, in_order: Callable[[list[Resident]], list[Resident]]) -> None:
        """``in_order``: returns parked sequences, given by last use, in the order in which they make way."""
        self._stays = stays
        self._in_order = in_order
        self.clear()

    def clear(self) -> None:
        """Begin with nothing to do, after a command was sent."""
        self.recycled: list[int] = []
        self.parked: dict[int, int] = {}
        self.dropped_runs: list[bytes] = []
        self.spilled_runs: list[bytes] = []
        self.sources: set[int] = set()
        self.spared: frozenset[int] = frozenset()
        self.is_urgent = False

    @property
    def evictable(self) -> list[Resident]:
        """The parked sequences that the next command does not copy, least recently used first."""
        return [one for key, one in self._stays.parked.items() if key not in self.sources]

    @property
    def in_order_of_eviction(self) -> list[Resident]:
        """The same, the first to make way first: bulk work before all else."""
        found = self._in_order(self.evictable)
        return sorted(found, key=lambda one: (one.sequence_id in self.spared, not one.sequence.is_bulk))

    @property
    def is_needed(self) -> bool:
        """Whether the next command has something to do first."""
        return bool(self._stays.releasing or self.recycled or self.parked or self.dropped_runs or self.spilled_runs)

    @property
    def message(self) -> Header:
        """The header as the command carries it."""
        return Header(
            release=(*self.recycled, *self._stays.releasing),
            park=tuple(self.parked.items()),
            drop_runs=tuple(self.dropped_runs),
            spill_runs=tuple(self.spilled_runs),
        )
