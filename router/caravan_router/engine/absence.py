"""What holds for the requests of a model while none of its shards is up."""

from dataclasses import dataclass

from caravan_scheduler.core.errors import NoShardError


@dataclass(frozen=True, slots=True)
class Absence:
    """Requests wait ``grace_s`` seconds for a shard, and then fail; those that come later, too.

    ``reason``: a sentence that clients may see; "": the usual one.
    """

    grace_s: float
    reason: str = ""

    def error(self, model: str, cause: str = "") -> NoShardError:
        """Return what requests for ``model`` fail with. ``cause``: for the log."""
        return NoShardError(cause or self.reason or "no shard is up", model=model, told=self.reason)
