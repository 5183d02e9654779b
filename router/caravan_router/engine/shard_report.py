"""What operators see of a shard."""

from dataclasses import replace

from caravan_router.engine.batcher import Batcher
from caravan_router.engine.link import ShardLink
from caravan_scheduler.core.shards import ShardReport, ShardRoom


def report_of(link: ShardLink, batcher: Batcher | None) -> ShardReport:
    """Return the state of the shard of ``link``; ``batcher``: the engine that commands it, if there is one."""
    report = ShardReport(address=link.address, standing=link.standing, epoch=link.epoch)
    if link.info is None:
        return report
    leased = None if batcher is None else batcher.scheduler.shards.get(link.address)
    limits = link.info.limits if leased is None else leased.capacity.limits
    return replace(
        report,
        shard_id=link.info.shard_id,
        version=link.info.version,
        model=link.info.facts.name,
        model_fingerprint=link.info.facts.sha256,
        room=ShardRoom(
            max_sequences=limits.max_sequences,
            max_batch_tokens=limits.max_batch_tokens,
            cells=limits.layout.cells,
            cells_per_sequence=limits.layout.cells_per_sequence,
            unified=limits.layout.shares_cells,
            draft_tokens=limits.draft_tokens,
        ),
        numerics=link.info.numerics,
        sequences=0 if leased is None else len(leased.stays.residents),
        used_cells=0 if leased is None else leased.cells.live,
    )
