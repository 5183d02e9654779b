"""Ledgers of shards with sequences on them, without a scheduler: commands are sent and answered by hand."""

from collections.abc import Iterable
from typing import Any

from caravan_proto.messages.commands import Chunk, Decode, Prefill, PrefixCopy, Save
from caravan_proto.messages.limits import LayoutLimits, Saving
from caravan_proto.messages.results import Loaded, Saved
from caravan_scheduler.config import Clock, SchedulerConfig
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.shard_index import ShardIndex
from caravan_scheduler.planning.step_plan import parameters_of
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.command import InFlight
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.prefix_reuse import find_match
from caravan_scheduler.shard.resident import Resident
from caravan_testing.model_media import ENCODER
from caravan_testing.requests import request


def limits_of(
    *,
    cells: int = 400,
    cells_per_sequence: int = 400,
    max_sequences: int = 4,
    max_batch_tokens: int = 128,
    memory_bytes: int = 0,
    max_prompt_logprob_tokens: int = 1,
    **layout: Any,
) -> ShardLimits:
    """Return the limits of a shard with one layout. ``layout``: more fields of it."""
    return ShardLimits(
        layout=LayoutLimits(cells=cells, cells_per_sequence=cells_per_sequence, **layout),
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        memory_bytes=memory_bytes,
        max_prompt_logprob_tokens=max_prompt_logprob_tokens,
        encoder=ENCODER,
    )


LIMITS = limits_of()
# Fields of `limits_of` for a shard that can save as many cells as it likes.
SAVING: dict[str, Any] = {"memory_bytes": 1 << 20, "saving": Saving.ANY}
_TOKEN = GeneratedToken(50, b"x", False, None, (), None)


def ledger(name: str = "a", limits: ShardLimits = LIMITS, config: SchedulerConfig | None = None) -> ShardLedger:
    """Return the ledger of an empty shard."""
    return ShardLedger(name, limits, config or SchedulerConfig())


def cells_of(shard: ShardLedger) -> tuple[int, int, int]:
    """Return how many cells of ``shard`` sequences have that are not parked, all sequences have, and are free."""
    return shard.cells.live, shard.cells.held, shard.cells.free


def index_of(*shards: ShardLedger) -> ShardIndex:
    """Return an index that has looked at ``shards``, at 0 s."""
    index = ShardIndex({shard.name: shard for shard in shards}, Clock(), OutputLengths())
    for shard in shards:
        index.update(shard.name, may_start=True)
    return index


def sequence(
    request_id: int,
    prompt: Iterable[int] = range(1, 11),
    max_new_tokens: int = 20,
    *,
    priority: int = 0,
    adapter: str = "",
    prompt_logprobs: bool = False,
) -> Sequence:
    """Return a sequence that waits for its first stay."""
    return Sequence(
        request(
            request_id,
            tuple(prompt),
            max_new_tokens,
            priority=priority,
            adapter=adapter,
            prompt_logprobs=prompt_logprobs,
        )
    )


def send_prefill(shard: ShardLedger, *residents: Resident) -> InFlight:
    """Send a Prefill with the rest of the prompts of ``residents``."""
    chunks = tuple(
        Chunk(
            sequence_id=one.sequence_id,
            start=one.computed,
            token_ids=one.sequence.tokens(one.computed, one.target),
            last=True,
            setup=None if one.is_running else parameters_of(one.sequence),
            copy=None if one.source_id is None else PrefixCopy(one.source_id, one.cached),
        )
        for one in residents
    )
    shard.send(Prefill(shard=shard.name, command_id=1, header=shard.header.message, chunks=chunks, ride=()), residents)
    return shard.commands.in_flight[-1]


def send_decode(shard: ShardLedger, *residents: Resident, max_steps: int = 8) -> InFlight:
    """Send a Decode of ``residents``."""
    ids = tuple(resident.sequence_id for resident in residents)
    command = Decode(shard=shard.name, command_id=2, header=shard.header.message, sequence_ids=ids, max_steps=max_steps)
    shard.send(command, residents)
    return shard.commands.in_flight[-1]


def send_save(shard: ShardLedger, *residents: Resident, release: bool = True) -> InFlight:
    """Send a Save of ``residents``."""
    entries = tuple(shard.save(residents, release=release))
    shard.send(Save(shard=shard.name, command_id=3, header=shard.header.message, entries=entries), residents)
    return shard.commands.in_flight[-1]


def saved(*results: bool, size: int = 100) -> Saved:
    """Return the reply to a Save with these results, each of ``size`` bytes."""
    sizes = tuple(size if result else 0 for result in results)
    return Saved(shard="a", command_id=3, saved=results, sizes_bytes=sizes, seconds=0.001)


def loaded(*results: bool, bad_runs: tuple[bytes, ...] = ()) -> Loaded:
    """Return the reply to a Load with these results."""
    return Loaded(shard="a", command_id=4, loaded=results, bad_runs=bad_runs, seconds=0.001)


def succeed(shard: ShardLedger, command: InFlight, seconds: float = 0.1) -> None:
    """Let the only step of ``command`` succeed, and ``command`` end."""
    shard.apply_step(command, seconds)
    shard.commands.end(command)


def start(shard: ShardLedger, waiting: Sequence, priority: int = 0) -> Resident:
    """Place ``waiting`` with the prefix that the shard has of it, and send its prompt."""
    resident = shard.place(waiting, find_match(shard, waiting), priority)
    send_prefill(shard, resident)
    return resident


def run(shard: ShardLedger, waiting: Sequence, *, priority: int = 0, output: int = 0) -> Resident:
    """Start ``waiting``, compute its prompt, and decode ``output`` tokens after the first."""
    resident = start(shard, waiting, priority)
    succeed(shard, shard.commands.in_flight[-1])
    waiting.output.append(50)
    for _ in range(output):
        decode(shard, resident)
        waiting.output.append(50)
    return resident


def decode(shard: ShardLedger, resident: Resident, tokens: int = 1) -> None:
    """Let ``resident`` decode ``tokens``, which the sequence does not learn of."""
    command = InFlight(Decode(sequence_ids=(resident.sequence_id,), max_steps=tokens), [resident])
    shard.take_tokens(command, [(resident.sequence_id, _TOKEN)] * tokens)


def swap_out(shard: ShardLedger, resident: Resident) -> None:
    """Save and release ``resident``; its sequence waits again."""
    command = send_save(shard, resident)
    assert shard.apply_save(command, saved(True)) == [(resident, True)]
    shard.commands.end(command)
    resident.sequence.saved_on = shard.name
