"""Decodes the saved runs of a shard."""

from caravan_proto.shard.v1 import shard_pb2
from caravan_proto.wire import decode_note
from caravan_scheduler.events import SavedRun


def saved_runs(message: shard_pb2.ListRunsResponse) -> list[SavedRun]:
    """Decode a part of the reply to ListRuns."""
    cuts = list(zip(message.cuts, message.keys, strict=True))
    runs: list[SavedRun] = []
    at = 0
    for start, size, on_disk, count, note in zip(
        message.starts, message.bytes, message.on_disk, message.cut_counts, message.notes, strict=True
    ):
        runs.append(
            SavedRun(
                start=start,
                cuts=tuple(cuts[at : at + count]),
                size_bytes=size,
                on_disk=on_disk,
                note=decode_note(note),
            )
        )
        at += count
    return runs
