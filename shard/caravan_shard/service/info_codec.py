"""Encodes what the shard says of itself: model, limits, saved runs."""

from collections.abc import Iterator, Sequence

from caravan_proto.messages.limits import Limits, SavedBytes
from caravan_proto.shard.v1 import shard_pb2
from caravan_shard.backends.base import Capacity
from caravan_shard.protocol.run import StoredRun

_CUT_BYTES = 20
# A message ends with the run that makes it this large. That is far below the limit, since a run may have a long note.
_MESSAGE_BYTES = 1 << 19


def limits(
    capacity: Capacity,
    *,
    max_top_n_tokens: int,
    max_tokenize_bytes: int,
    saved_capacity: SavedBytes,
    run_fingerprint: str,
) -> Limits:
    """Return the limits for Info."""
    return Limits(
        layouts=capacity.layouts,
        max_sequences=capacity.max_sequences,
        max_batch_tokens=capacity.max_batch_tokens,
        max_top_n_tokens=max_top_n_tokens,
        max_tokenize_bytes=max_tokenize_bytes,
        max_prompt_logprob_tokens=capacity.max_prompt_logprob_tokens,
        max_draft_tokens=capacity.max_draft_tokens,
        embedding_size=capacity.embedding_size,
        max_embed_tokens=capacity.max_embed_tokens,
        embed_tokens_at_once=capacity.joint_embed.tokens * capacity.joint_embed.lanes,
        ranks=capacity.ranks,
        saved_capacity=saved_capacity,
        run_fingerprint=run_fingerprint,
    )


def runs_responses(runs: Sequence[tuple[StoredRun, bool]]) -> Iterator[shard_pb2.ListRunsResponse]:
    """Encode runs, each with whether it is on disk, as the messages of ListRuns."""
    first = size = 0
    for place, (run, _) in enumerate(runs):
        size += len(run.cuts) * _CUT_BYTES + len(run.note)
        if size >= _MESSAGE_BYTES or place == len(runs) - 1:
            yield _runs_response(runs[first : place + 1])
            first, size = place + 1, 0


def _runs_response(runs: Sequence[tuple[StoredRun, bool]]) -> shard_pb2.ListRunsResponse:
    return shard_pb2.ListRunsResponse(
        starts=[run.start for run, _ in runs],
        bytes=[run.size for run, _ in runs],
        on_disk=[on_disk for _, on_disk in runs],
        cut_counts=[len(run.cuts) for run, _ in runs],
        cuts=[cut for run, _ in runs for cut in run.cuts],
        keys=[key for run, _ in runs for key in run.keys],
        notes=[run.note for run, _ in runs],
    )
