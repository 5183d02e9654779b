"""Applies the lease: only its holder's commands run, and nothing of it stays when it expires or changes hands."""

import logging
from time import monotonic

from caravan_proto.errors import ShardError
from caravan_proto.messages.model import ShardClaim
from caravan_shard.engine.worker import Worker
from caravan_shard.protocol.results import Refusal
from caravan_shard.service.lease import LeaseBook, LeaseChange

_log = logging.getLogger(__name__)

_EXPIRED = Refusal(ShardError.NOT_LEASED, "the lease has expired")
_RELEASED = Refusal(ShardError.NOT_LEASED, "the router gave the shard back")
_OVERTAKEN = Refusal(ShardError.STALE_EPOCH, "another lease took the shard")


class LeaseGuard:
    """The shard's lease. Every method first ends a lease whose time is over."""

    def __init__(self, worker: Worker) -> None:
        self._book = LeaseBook()
        self._worker = worker

    @property
    def epoch(self) -> int:
        """The last epoch granted; 0 before the first."""
        return self._book.epoch

    @property
    def is_held(self) -> bool:
        """Whether a router holds the shard."""
        self.expire()
        return self._book.is_held

    @property
    def holder_url(self) -> str:
        """Where other routers reach the router that holds the shard; empty if none does, or they cannot."""
        self.expire()
        return self._book.holder_url

    def request(self, router_id: str, epoch: int, ttl_s: float, url: str) -> Refusal | None:
        """Grant or renew a lease. Return why not, if refused."""
        self.expire()
        granted = self._book.request(router_id, epoch, ttl_s, monotonic(), url)
        if isinstance(granted, Refusal):
            return granted
        if granted is LeaseChange.TAKEN:
            self._worker.release_all(_OVERTAKEN)
        return None

    def ask(self, router_id: str, claim: ShardClaim) -> Refusal | None:
        """Return None if no other router holds the shard; else note that this one would like to."""
        self.expire()
        return self._book.ask(router_id, claim, monotonic())

    @property
    def claim(self) -> ShardClaim | None:
        """The claim of another router that would like to have this shard; None if there is none."""
        return self._book.claim(monotonic())

    def note_broken(self, epoch: int) -> None:
        """Let the lease of ``epoch``, whose holder's connection broke, end soon."""
        self._book.note_broken(epoch, monotonic())

    def release(self, router_id: str, epoch: int) -> Refusal | None:
        """End a lease that its holder gives back, and release every sequence. Return why not, if refused."""
        self.expire()
        refusal = self._book.release(router_id, epoch)
        if refusal is None:
            self._worker.release_all(_RELEASED)
        return refusal

    def check(self, epoch: int) -> Refusal | None:
        """Return None if a command under ``epoch`` may run, else why not."""
        self.expire()
        return self._book.check(epoch)

    def expire(self) -> None:
        """Release every sequence if the lease has expired."""
        if self._book.expire(monotonic()):
            _log.warning("the lease expired: every sequence is released", extra={"epoch": self._book.epoch})
            self._worker.release_all(_EXPIRED)
