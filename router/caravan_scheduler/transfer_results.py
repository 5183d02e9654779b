"""What becomes of requests when saved runs have come from another shard, or have not."""

from caravan_scheduler.events import Fetched
from caravan_scheduler.state import SchedulerState


def apply_transfer(state: SchedulerState, event: Fetched) -> None:
    """Note which runs have come to a shard, and let the request that waits for them start."""
    unwanted = state.transfers.unwanted_keys(event.transfer_id)
    transfer = state.transfers.end(event.transfer_id, event.seconds if all(event.fetched) else 0.0)
    if transfer is None:
        return  # one of the shards was lost
    target = state.shards[transfer.target]
    came = [run for run, fetched in zip(transfer.runs, event.fetched, strict=True) if fetched]
    target.saves.note_runs(came)
    for key in unwanted:
        target.saves.drop(key)
    waiting = state.sequences.get(transfer.request_id) if transfer.request_id is not None else None
    if waiting is not None and len(came) < len(transfer.runs):
        state.fetch_no_more(waiting)
    state.waiting.mark_due()
    state.note_change(transfer.source, may_start=False)
    state.note_change(transfer.target, may_start=True)
