"""Has the media of a request encoded where it is to start, while steps go on."""

from caravan_scheduler.actions import Encode
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.state import SchedulerState

# A shard is given no more media once so many wait there: what it has encoded too early, it may drop before it is used.
_MOST_WAITING = 4


def begin_encoding(state: SchedulerState, sequence: Sequence, shard: ShardAccount, cached: int) -> bool:
    """Let ``shard`` encode what ``sequence`` needs behind ``cached`` tokens. Return whether ``sequence`` must wait."""
    media = sequence.spec.media
    if media is None:
        return False
    missing = shard.media.missing(media.behind(cached))
    if not missing:
        return False
    under_way = {one.media_id: one.encode_id for one in state.encodings.under_way(shard.name)}
    new = [media_id for media_id in missing if media_id not in under_way]
    if new and len(under_way) >= _MOST_WAITING:
        return True
    for media_id in new:
        encoding = state.encodings.begin(shard.name, media_id, missing[media_id])
        under_way[media_id] = encoding.encode_id
        state.outbox.add(Encode(encoding.encode_id, shard.name, media.contents[media_id]))
    state.encodings.let_wait(sequence.request_id, [under_way[media_id] for media_id in missing])
    return True
