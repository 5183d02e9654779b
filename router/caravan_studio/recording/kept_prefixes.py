"""What shards keep, told by its place: a recording forgets a key when one shard drops it, and others may have it."""

from collections.abc import Iterator

from caravan_proto.messages.commands import Load
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.kept_run import KeptRun
from caravan_studio.recording.events import PrefixOf


def find_prefix(scheduler: Scheduler, key: bytes) -> PrefixOf | None:
    """Return where the prefix of this key is; None if no shard keeps it."""
    for shard in scheduler.shards.values():
        for resident in shard.stays.parked.values():
            if resident.prefix_key == key:
                return PrefixOf(resident.request_id, resident.computed)
    for shard in scheduler.shards.values():
        for place, run in enumerate(_runs(shard)):
            for position, cut in run.cuts:
                if cut == key:
                    return PrefixOf(place, position, shard.name)
    return None


def key_of(scheduler: Scheduler, prefix: PrefixOf) -> bytes | None:
    """Return the key of a prefix for which `find_prefix` returned ``prefix``; None if it is not there."""
    if prefix.shard:
        shard = scheduler.shards.get(prefix.shard)
        cuts = () if shard is None else next((run.cuts for at, run in enumerate(_runs(shard)) if at == prefix.of), ())
        return next((key for position, key in cuts if position == prefix.length), None)
    for shard in scheduler.shards.values():
        for resident in shard.stays.parked.values():
            if (resident.request_id, resident.computed) == (prefix.of, prefix.length):
                return resident.prefix_key
    return None


def _runs(shard: ShardAccount) -> Iterator[KeptRun]:
    for runs in shard.runs.listed.values():
        yield from runs


def loaded_keys(scheduler: Scheduler, shard_name: str, command_id: int) -> list[bytes]:
    """Return the keys of all that a Load under way loads; none if it is not there."""
    shard = scheduler.shards.get(shard_name)
    begun = None if shard is None else shard.commands.find(command_id)
    if begun is None or not isinstance(begun.command, Load):
        return []
    return [piece.key for entry in begun.command.entries for piece in entry.slices]
