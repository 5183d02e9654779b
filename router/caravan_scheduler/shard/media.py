"""The media that a shard has encoded, as far as the router knows, and what encoding takes there."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from caravan_proto.messages.media import MediaSpan

# Seconds of a cell before any was measured.
_FIRST_CELL_S = 1e-3
_NEWEST = 0.3
# Media that are remembered. A shard drops what was used least recently by its own limit, and says so when it is asked.
_MOST_KNOWN = 4096


class ShardMedia:
    """A shard says what it lacks, so what is noted here may be wrong. ``cell_s``: seconds to encode a cell."""

    def __init__(self) -> None:
        # By id, least recently used first.
        self._encoded: OrderedDict[bytes, None] = OrderedDict()
        self.cell_s = _FIRST_CELL_S

    def missing(self, spans: Iterable[MediaSpan]) -> Mapping[bytes, int]:
        """Return which media of ``spans`` are not encoded, each with the cells that it has there."""
        cells: dict[bytes, int] = {}
        for span in spans:
            if span.media_id not in self._encoded:
                cells[span.media_id] = cells.get(span.media_id, 0) + span.count
        return cells

    def encode_s(self, spans: Iterable[MediaSpan]) -> float:
        """Return how long it takes to encode what is missing of ``spans``, in seconds."""
        return self.cell_s * sum(self.missing(spans).values())

    # Changes, which the scheduler makes

    def note(self, media_id: bytes, cells: int, seconds: float) -> None:
        """Note that a medium is encoded, which has taken ``seconds``; 0 if it was before."""
        self._encoded[media_id] = None
        self._encoded.move_to_end(media_id)
        if len(self._encoded) > _MOST_KNOWN:
            self._encoded.popitem(last=False)
        if seconds > 0:
            self.cell_s += _NEWEST * (seconds / cells - self.cell_s)

    def forget(self, media_ids: Collection[bytes]) -> None:
        """Note that the shard has dropped these media."""
        for media_id in media_ids:
            self._encoded.pop(media_id, None)
