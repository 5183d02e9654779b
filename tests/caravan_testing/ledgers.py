"""Ledgers of shards with sequences on them, without a scheduler: commands are sent and answered by hand."""

from collections.abc import Iterable

from caravan_router.scheduling.actions import Chunk, Decode, Prefill, PrefixCopy, SwapOut, SwapOutEntry
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import ShardLimits
from caravan_router.scheduling.sequence import Sequence, SwapTicket
from caravan_router.scheduling.shard.command import InFlight
from caravan_router.scheduling.shard.ledger import ShardLedger
from caravan_router.scheduling.shard.resident import Resident
from caravan_testing.requests import request

LIMITS = ShardLimits(cells=400, cells_per_sequence=400, max_sequences=4, max_batch_tokens=128)


def ledger(name: str = "a", limits: ShardLimits = LIMITS, config: SchedulerConfig | None = None) -> ShardLedger:
    """Return the ledger of an empty shard."""
    return ShardLedger(name, limits, config or SchedulerConfig())


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
            setup=None if one.is_running else one.sequence.spec,
            copy=None if one.source_id is None else PrefixCopy(one.source_id, one.shared),
        )
        for one in residents
    )
    shard.send(Prefill(shard=shard.name, command_id=1, header=shard.next_header, chunks=chunks, ride=()), residents)
    return shard.in_flight[-1]


def send_decode(shard: ShardLedger, *residents: Resident, max_steps: int = 8) -> InFlight:
    """Send a Decode of ``residents``."""
    ids = tuple(resident.sequence_id for resident in residents)
    command = Decode(shard=shard.name, command_id=2, header=shard.next_header, sequence_ids=ids, max_steps=max_steps)
    shard.send(command, residents)
    return shard.in_flight[-1]


def send_swap_out(shard: ShardLedger, *residents: Resident) -> InFlight:
    """Send a SwapOut of ``residents``."""
    entries = tuple(
        SwapOutEntry(sequence_id=one.sequence_id, start=shard.kept_length(one, residents), handle=shard.leave(one))
        for one in residents
    )
    shard.send(SwapOut(shard=shard.name, command_id=3, header=shard.next_header, entries=entries), residents)
    return shard.in_flight[-1]


def succeed(shard: ShardLedger, command: InFlight, seconds: float = 0.1) -> None:
    """Let the only step of ``command`` succeed, and ``command`` end."""
    shard.apply_step(command, seconds)
    shard.end_command(command)


def start(shard: ShardLedger, waiting: Sequence, priority: int = 0) -> Resident:
    """Place ``waiting`` with the prefix that the shard has of it, and send its prompt."""
    resident = shard.place(waiting, shard.match(waiting), priority)
    send_prefill(shard, resident)
    return resident


def run(shard: ShardLedger, waiting: Sequence, *, priority: int = 0, output: int = 0) -> Resident:
    """Start ``waiting``, compute its prompt, and decode ``output`` tokens after the first."""
    resident = start(shard, waiting, priority)
    succeed(shard, shard.in_flight[-1])
    waiting.output.append(50)
    for _ in range(output):
        shard.grow(resident)
        waiting.output.append(50)
    return resident


def swap_out(shard: ShardLedger, resident: Resident) -> SwapTicket:
    """Swap ``resident`` out and return its ticket."""
    command = send_swap_out(shard, resident)
    ((_, ticket),) = shard.apply_swap_out(command, (True,), 0.001)
    shard.end_command(command)
    assert ticket is not None
    resident.sequence.ticket = ticket
    return ticket
