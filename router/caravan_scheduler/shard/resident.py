"""A sequence's stay on one shard, and the states of that stay."""

import math
from dataclasses import dataclass, field
from enum import Enum

from caravan_scheduler.sequence import Sequence


class Status(Enum):
    """The state of a stay, and whether its request waits for results. Only `ShardLedger` changes it."""

    # It has an id and cells; the command that starts it is being planned or under way.
    STARTING = "starting", True
    # The shard holds its first cells, which were saved before, under its id; its first chunk is to come.
    LOADED = "loaded", True
    # The shard holds it.
    RUNNING = "running", True
    # A Save that releases it is under way.
    LEAVING = "leaving", True
    # The same, and nobody waits for it: it ended before or meanwhile.
    DROPPED = "dropped", False
    # It ended; the shard keeps its cells, and other sequences may start from them.
    PARKED = "parked", False
    # It ended; the shard releases its id and cells with the next command.
    RELEASING = "releasing", False
    # The stay is over: its id is free or belongs to another.
    GONE = "gone", False

    # Members are looked up in tables all the time, and an enumeration's own hash is that of a member's name.
    __hash__ = object.__hash__

    def __init__(self, word: str, is_live: bool) -> None:
        self.word = word
        self.is_live = is_live


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.STARTING: frozenset({Status.LOADED, Status.RUNNING, Status.RELEASING}),
    Status.LOADED: frozenset({Status.RUNNING, Status.RELEASING}),
    Status.RUNNING: frozenset({Status.LEAVING, Status.PARKED, Status.RELEASING}),
    Status.LEAVING: frozenset({Status.DROPPED, Status.GONE}),
    Status.DROPPED: frozenset({Status.GONE}),
    Status.PARKED: frozenset({Status.DROPPED, Status.RELEASING, Status.GONE}),
    Status.RELEASING: frozenset({Status.GONE}),
    Status.GONE: frozenset(),
}


@dataclass(slots=True)
class Hold:
    """For how long the cells of a parked sequence were held against others, and until when its job was charged for it.

    ``return_rate``: the rate at which its job was expected back, in 1/s, and ``looked_s``: when that was looked up.
    """

    held_s: float = 0.0
    rent_paid_s: float = 0.0
    return_rate: float = 0.0
    looked_s: float = -math.inf


@dataclass(slots=True, eq=False)
class Resident:
    """A sequence's stay on one shard, under one sequence id.

        position 0 ... cached ........ computed ........ target
                 copied       in the cache       to prefill    then one token per decode

    ``target``: number of tokens known when the stay began, which prefill must compute. ``source_id``: the sequence from
    which its first command takes the first ``cached`` tokens: another one, a parked one that it takes over, or what was
    loaded for it under its own id. ``shared``: how many first tokens are in cells that another sequence held when the
    stay began. ``priority``: effective priority when the stay began.
    ``last_used_s``: when it was parked, or last copied from while parked. ``is_expendable``: giving up its cells
    loses nothing, since they were saved or are not worth it. ``is_to_be_saved``: it was parked with something that does
    not make way for others and was not saved. ``is_continued``: the next request of its job has started,
    ``is_awaited``: it waits.
    """

    sequence: Sequence
    sequence_id: int
    source_id: int | None
    priority: int
    cached: int
    shared: int
    computed: int = field(init=False)
    target: int = field(init=False)
    status: Status = Status.STARTING
    last_used_s: float = 0.0
    is_expendable: bool = False
    is_to_be_saved: bool = False
    is_continued: bool = False
    is_awaited: bool = False
    hold: Hold = field(default_factory=Hold)
    # Hashes of its prefixes, by which others find it while they can start from it.
    prefix_hashes: tuple[int, ...] = ()
    # The request's number; kept here because it is read for every resident when another is to start.
    peak_cells: int = field(init=False)
    # Whether it is a beam of a search, which computes all that it knows and samples nothing.
    is_beam: bool = field(init=False)

    def __post_init__(self) -> None:
        self.computed, self.target = self.cached, self.sequence.known_tokens
        self.is_beam = self.sequence.group is not None
        self.peak_cells = self.sequence.request.peak_cells

    @property
    def request_id(self) -> int:
        return self.sequence.request_id

    @property
    def adapter(self) -> str:
        return self.sequence.spec.adapter

    @property
    def is_live(self) -> bool:
        """Whether its request waits for results; late results of other residents are ignored."""
        return self.status.is_live

    @property
    def prefix_key(self) -> bytes:
        """The key of the tokens that it has computed."""
        return self.sequence.keys.at(self.computed)

    @property
    def is_running(self) -> bool:
        return self.status is Status.RUNNING

    @property
    def is_parked(self) -> bool:
        return self.status is Status.PARKED

    @property
    def prefilling(self) -> bool:
        return self.computed < self.target

    @property
    def takes_over(self) -> bool:
        """Whether it started in place of a parked sequence, under that sequence's id."""
        return self.source_id == self.sequence_id

    @property
    def own_cells(self) -> int:
        """Cells that no other sequence shared when it started, including those that its prompt has yet to fill."""
        return (self.computed if self.computed > self.target else self.target) - self.shared
