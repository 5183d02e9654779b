"""The data of conversations: nodes, positions in chains of them, and heads.

A node adds items, such as messages and calls of tools, to those of its parent. A conversation is a head: a name for a
position. Forking makes a second head and rewinding moves one, so that neither copies items. A job is a response that is
generated for nobody in particular, with what is needed to continue it after the end of the router.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from caravan_scheduler.core.tokens import GeneratedToken

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The place after the first ``items`` items of a node. The default is the start of every chain."""

    node: str = ""
    items: int = 0

    @property
    def version(self) -> str:
        """A text that differs between positions, for clients that change a head only if nobody else has."""
        return f"{self.node or 'start'}.{self.items}"


START = Position()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactTokens:
    """The tokens of a prompt and the output that followed, for the model file of this ``fingerprint``."""

    fingerprint: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One turn, or items that a client added.

    ``response``: JSON of the response that the node is; empty for items that a client added. The first ``inputs`` of
    its items are the response's input. ``tokens``: those of the whole chain up to here, for a node that is written;
    None if they are not known.
    """

    id: str
    parent: Position = START
    items: tuple[Json, ...] = ()
    inputs: int = 0
    response: bytes = b""
    tokens: ExactTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """All nodes from the first one to that of ``position``, whose items after the position are left out.

    Only the last node has its ``response``. ``tokens``: those of the last node that has some. ``size``: bytes of its
    items as JSON.
    """

    position: Position = START
    nodes: Sequence[Node] = ()
    size: int = 0
    tokens: ExactTokens | None = None

    @property
    def items(self) -> list[Json]:
        """All items, the oldest first."""
        return [item for node in self.nodes for item in node.items]

    def after(self, count: int) -> Position:
        """Return the position after the first ``count`` items of the chain."""
        if count == 0:
            return START
        for node in self.nodes:
            if count <= len(node.items):
                return Position(node=node.id, items=count)
            count -= len(node.items)
        raise IndexError(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A conversation: a name for a position. ``created``: Unix time in seconds."""

    id: str
    created: float
    position: Position = START
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A part of a response that is generated in the background: events, and the tokens of which they tell.

    ``first``: number of the first event. ``feedback``: see `caravan_scheduler.core.generation.Continued`.
    """

    first: int
    events: tuple[bytes, ...]
    tokens: tuple[GeneratedToken, ...] = ()
    feedback: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """The end of the job of this ``id``. ``response``: JSON of the response if it is not stored as a node."""

    id: str
    step: Step
    response: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """The changes that are written together: a new node, a head, and the end of a job.

    ``expected``: the head's present position, without which nothing is written; None for a new head. ``moves``: whether
    the head only gets a new position. Its metadata may have changed since it was read.
    """

    node: Node | None = None
    head: Head | None = None
    expected: Position | None = None
    moves: bool = False
    ended: JobEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A response that is generated in the background, and has the ``id`` of the job.

    ``request``: JSON of what is needed to continue it. ``response``: JSON of the response as it was at the start, or of
    one that has ended without a node. ``next``: number of the next event. ``position``: what the response extends,
    which stays until the job has ended; None if it has, or if an earlier version of Caravan began it.
    """

    id: str
    owner: str
    request: bytes
    response: bytes
    ended: bool = False
    next: int = 0
    position: Position | None = None


class Added(Enum):
    """What became of a new job. ``FULL``: its owner has as many as it may. ``KNOWN``: there is one of its id."""

    ADDED = auto()
    FULL = auto()
    KNOWN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A job that this server works on, or is to continue. ``cancelled``: whether a client asked for its end."""

    owner: str
    id: str
    cancelled: bool = False


def new_id(prefix: str) -> str:
    """Return an id such as ``resp_9f86d081884c7d659a2feaa0c55ad015``."""
    return f"{prefix}_{secrets.token_hex(16)}"
