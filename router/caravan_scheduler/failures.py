"""Ends requests without their last token: too late, too large, or without a shard."""

from caravan_scheduler.actions import Fail, FailureReason
from caravan_scheduler.beams import BeamGroup
from caravan_scheduler.fault import on_behalf
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.state import SchedulerState


class Failures:
    """Changes the state, and tells clients why their requests ended."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._no_shard_grace_s = state.config.no_shard_grace_s
        self._no_shard_since: float | None = None

    @property
    def grace_s(self) -> float:
        """How long requests wait while no shard is up."""
        return self._no_shard_grace_s

    def set_grace(self, seconds: float) -> None:
        """Let requests wait so long from now on while no shard is up."""
        self._no_shard_grace_s = seconds

    @on_behalf(1)
    def fail(self, sequence: Sequence, reason: FailureReason) -> None:
        """End a request. A beam search that has no time left delivers what it has found."""
        group = sequence.group
        members = [sequence] if group is None else group.members
        ended: set[int] = set()
        if group is not None and reason is FailureReason.DEADLINE:
            ended = self.deliver_beams(group)
        # Cells without numbers would make those of others so that begin with them.
        self._state.abort(sequence, keeps=reason is not FailureReason.NO_LOGITS)
        for member in members:
            if member.request_id not in ended:
                self._state.outbox.add(Fail(member.request_id, reason))

    def deliver_beams(self, group: BeamGroup[Sequence]) -> set[int]:
        """Deliver the best outputs so far, one to each member. Return the requests whose output has ended."""
        ended = set()
        for member, (_, tokens) in zip(group.members, group.best(), strict=False):
            for token in tokens:
                self._state.outbox.deliver_token(member.request_id, token)
            if tokens[-1].finish is not None:
                ended.add(member.request_id)
        return ended

    def fail_misfits(self, sequences: list[Sequence]) -> None:
        """End requests of ``sequences`` that fit no shard even when it is empty. Without any shard they may wait."""
        for sequence in sequences if self._state.shards else ():
            is_known = sequence.request_id in self._state.sequences  # else its beam search has failed
            if is_known and not self._fits(sequence):
                self.fail(sequence, FailureReason.DOES_NOT_FIT)

    @on_behalf(1)
    def _fits(self, sequence: Sequence) -> bool:
        return any(shard.capacity.could_ever_hold(sequence) for shard in self._state.shards.values())

    def fail_late(self, now: float) -> None:
        """End requests whose deadline has passed."""
        for request_id, reason in self._state.deadlines.due(now):
            sequence = self._state.sequences.get(request_id)
            if sequence is not None and not (reason is FailureReason.QUEUE_TIMEOUT and sequence.started):
                self.fail(sequence, reason)

    def fail_without_shards(self, now: float) -> None:
        """End requests that have waited without any shard for too long."""
        if self._state.shards:
            self._no_shard_since = None
            return
        if self._no_shard_since is None:
            self._no_shard_since = now
        for sequence in list(self._state.waiting):
            since = max(self._no_shard_since, sequence.request.arrived_s)
            if now - since >= self._no_shard_grace_s:
                self.fail(sequence, FailureReason.NO_SHARD)
