"""The shards that can take a request, and which of them are to be asked for one."""

from collections.abc import Iterable

from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.ledger import ShardLedger


class OpenShards:
    """A shard is *open* if it can take a command and has a sequence id; ``by_name`` has those.

    One that had no cells for requests is among ``without_cells`` until it changes. It has residents, so it does change.
    Until then it is asked for new requests only, not for the ``refused``, for which no shard had room.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, ShardLedger] = {}
        self.without_cells: set[str] = set()
        self.refused: set[int] = set()
        # Shards that changed so that a request may start there, by whether they can take a command.
        self.due: set[str] = set()
        self._due_later: set[str] = set()
        self.with_two_layouts: set[str] = set()

    def update(self, shard: ShardLedger, *, may_start: bool) -> None:
        """Look at ``shard``, which changed. ``may_start``: maybe a request can start there by that."""
        name, can_command = shard.name, shard.commands.can_begin
        if may_start:
            self._due_later.add(name)
            self.without_cells.discard(name)
        if can_command and name in self._due_later:
            self._due_later.remove(name)
            self.due.add(name)
        if can_command and shard.stays.free_sequences > 0:
            self.by_name[name] = shard
        else:
            self.by_name.pop(name, None)
        if shard.capacity.limits.other_layout is None:
            self.with_two_layouts.discard(name)
        else:
            self.with_two_layouts.add(name)

    def forget(self, shard: str) -> None:
        """Forget ``shard``, which is gone."""
        self.by_name.pop(shard, None)
        for names in (self.due, self._due_later, self.without_cells, self.with_two_layouts):
            names.discard(shard)

    def to_ask(self, sequence: Sequence) -> Iterable[ShardLedger]:
        """Return the shards that are to be asked whether ``sequence`` can start."""
        if self.without_cells and sequence.request_id in self.refused:
            return [shard for name, shard in self.by_name.items() if name not in self.without_cells]
        return self.by_name.values()
