"""What a link asks of the fleet that it belongs to, and why its session with the shard may end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caravan_proto.messages.model import ShardClaim
from caravan_router.engine.command_runner import EventSink
from caravan_router.engine.shard_info import ShardInfo

if TYPE_CHECKING:
    from caravan_router.engine.link import ShardLink


class SessionError(Exception):
    """Why a session with the shard ended or could not start, apart from a failed call."""


class RefusedError(SessionError):
    """The shard may not serve beside the others."""


class InsecureError(SessionError):
    """Router and shard do not agree on TLS, or one refuses the other's certificate."""


class DrainedError(SessionError):
    """The shard drained as planned, and has ended or is another router's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOwner:
    """``accept`` judges a shard before it joins: it returns the engine of its model, or a reason to refuse it.

    ``is_other`` says whether what is known now of the shard's files tells it from the other shards of its engine.
    ``claim`` returns what to ask a shard with the model of that fingerprint with; None if this router needs no more of
    them. ``on_wanted`` is called when `ShardLink.wanted_by` has changed.
    """

    accept: "Callable[[ShardLink, ShardInfo], EventSink | str]"
    is_other: "Callable[[ShardLink, ShardInfo], bool]" = lambda _link, _info: False
    claim: Callable[[str], ShardClaim | None] = lambda _fingerprint: ShardClaim(0)
    on_wanted: Callable[[], None] = lambda: None

    def engine_of(self, link: "ShardLink", info: ShardInfo) -> EventSink:
        """Return the engine of the shard's model. Raises RefusedError."""
        accepted = self.accept(link, info)
        if isinstance(accepted, str):
            raise RefusedError(accepted)
        return accepted

    def check_same(self, link: "ShardLink", info: ShardInfo) -> None:
        """Tell the engine of a leased shard what is in its files now. Raise SessionError if it is another's shard."""
        if self.is_other(link, info):
            raise SessionError("the file of its model has the name of another one, and other weights")
        self.engine_of(link, info)
