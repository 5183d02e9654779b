"""What becomes of encoded media and of saved runs that shards fetched from others, and what steps tell of the load."""

from collections.abc import Collection, Iterable

from caravan_proto.messages.commands import Evaluate, Prefill
from caravan_scheduler.actions import FailureReason
from caravan_scheduler.events import Encoded, EncodeOutcome, Fetched, Stepped
from caravan_scheduler.failures import Failures
from caravan_scheduler.load import Load
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.command import InFlight
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.state import SchedulerState


class EncodingResults:
    """Applies them to ``state``; what cannot go on ends by ``failures``."""

    def __init__(self, state: SchedulerState, failures: Failures) -> None:
        self._state = state
        self._failures = failures

    def apply(self, event: Encoded) -> None:
        """Note that a medium is encoded, or is not; the requests that wait for it are asked for again."""
        ended = self._state.encodings.end(event.encode_id)
        if ended is None:
            return  # the shard was lost
        encoding, requests = ended
        if event.outcome is EncodeOutcome.DONE:
            shard = self._state.shards[encoding.shard]
            shard.media.note(encoding.media_id, encoding.cells, event.seconds)
        else:
            self._count(requests, is_final=event.outcome is EncodeOutcome.REFUSED)
        self._state.waiting.mark_due()
        self._state.note_change(encoding.shard, may_start=True)

    def lose(self, shard: ShardLedger) -> None:
        """Forget what ``shard`` encodes, which is gone: maybe because of that, unless it drained."""
        self._state.encodings.lose(shard.name, is_blamed=not shard.drain.has_begun)
        self._state.waiting.mark_due()
        self.end_deadly(list(self._state.waiting))

    def end_deadly(self, sequences: Iterable[Sequence]) -> None:
        """End those of ``sequences`` that have a medium during whose encoding shards were lost again and again."""
        deadly = self._state.encodings.deadly(self._state.config.max_fatal_losses)
        for sequence in sequences if deadly else ():
            media = sequence.spec.media
            if media is not None and not deadly.isdisjoint(media.contents):
                self._failures.fail(sequence, FailureReason.MEDIA)

    def note_missing(self, shard: ShardLedger, command: InFlight, media_ids: Collection[bytes]) -> None:
        """Let requests wait again whose chunks in ``command`` had these media, which ``shard`` has not encoded.

        A stay that had begun ends: what it has computed is kept for the next.
        """
        shard.media.forget(media_ids)
        for sequence_id in _with_any_of(command, media_ids):
            resident = command.residents[sequence_id]
            sequence = resident.sequence
            if resident.is_live:
                has_advanced = resident.computed > sequence.reached
                if sequence.group is None:
                    shard.cancel(resident, at_rest=True)
                self._state.wait_again(sequence)
                if has_advanced:
                    continue
            self._count([sequence.request_id])

    def _count(self, requests: Collection[int], *, is_final: bool = False) -> None:
        """Count an attempt of ``requests`` that failed, and end those that have had too many."""
        for sequence in self._waiting(requests):
            sequence.note_lost_media()
            if is_final or sequence.losses > self._state.config.max_losses:
                self._failures.fail(sequence, FailureReason.MEDIA)

    def _waiting(self, requests: Collection[int]) -> list[Sequence]:
        """Return the sequences of ``requests`` that have not ended, of a beam search its leader."""
        found = (self._state.sequences.get(request_id) for request_id in requests)
        return [one if one.group is None else one.group.leader for one in found if one is not None]


def _with_any_of(command: InFlight, media_ids: Collection[bytes]) -> list[int]:
    """Return the sequences whose chunk or row in ``command`` has any of these media."""
    match command.command:
        case Prefill(chunks=parts) | Evaluate(rows=parts):
            return [part.sequence_id for part in parts if any(span.media_id in media_ids for span in part.media)]
        case _:
            return []


def apply_transfer(state: SchedulerState, event: Fetched) -> None:
    """Note which runs have come to a shard, and let the request that waits for them start."""
    unwanted = state.transfers.unwanted_keys(event.transfer_id)
    transfer = state.transfers.end(event.transfer_id, event.seconds if all(event.fetched) else 0.0)
    if transfer is None:
        return  # the target was lost
    target = state.shards[transfer.target]
    came = [run for run, fetched in zip(transfer.runs, event.fetched, strict=True) if fetched]
    target.saves.note_runs(came)
    for key in unwanted:
        target.saves.drop(key)
    waiting = state.sequences.get(transfer.request_id) if transfer.request_id is not None else None
    if waiting is not None and len(came) < len(transfer.runs):
        state.fetch_no_more(waiting)
    state.waiting.mark_due()
    state.note_change(transfer.source, may_start=False)
    state.note_change(transfer.target, may_start=True)


def note_load(load: Load, shard: ShardAccount, command: InFlight, event: Stepped) -> None:
    """Learn from a step, before it is applied, what the load takes of shards."""
    chunks = command.chunk_tokens
    if command.is_decode and event.tokens:
        decoding = command.live(shard.stays.version) if event.drafts else len(event.tokens)
        load.decodes.note(max(1, decoding), len(event.tokens), event.seconds)
    elif isinstance(command.command, Prefill):
        load.note_chunks(sum(chunks.values()), event.seconds, riders=len(command.residents) - len(chunks))
