"""The beam searches of a shard, and the sequence ids that they have yet to use."""

from typing import TYPE_CHECKING

from caravan_router.scheduling.shard.resident import Resident

if TYPE_CHECKING:
    from caravan_router.scheduling.beams import BeamGroup


class BeamPlaces:
    """``groups``: the residents of each beam search, by index.

    ``reserved_ids``: those of beams that have yet to branch off.
    """

    def __init__(self) -> None:
        self.groups: dict[BeamGroup, dict[int, Resident]] = {}
        self.reserved_ids = 0

    def add(self, resident: Resident) -> None:
        """Note that ``resident`` has a place, if it is a beam."""
        if (group := resident.sequence.group) is not None:
            beams = self.groups.setdefault(group, {})
            self.reserved_ids += group.width - 1 if not beams else -1
            beams[group.index_of(resident.sequence)] = resident

    def remove(self, resident: Resident) -> None:
        """Note that ``resident`` has no place any more, if it is a beam."""
        if (group := resident.sequence.group) is not None:
            beams = self.groups[group]
            del beams[group.index_of(resident.sequence)]
            if beams:
                self.reserved_ids += 1
            else:
                self.reserved_ids -= group.width - 1
                del self.groups[group]
