"""Checks the entries of Save and Load."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import LoadEntry, RunSlice, SaveEntry
from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_proto.messages.model import ModelFile
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.checks.media import MediaCheck, check_border
from caravan_shard.checks.preview import Preview, check_keys
from caravan_shard.checks.step import check_adapter
from caravan_shard.checks.tokens import check_ids
from caravan_shard.media import held_spans
from caravan_shard.protocol.results import Refusal, bad_request
from caravan_shard.sequences.run_format import MAX_NOTE_BYTES
from caravan_shard.sequences.runs import RunStore


class SaveCheck:
    """Checks the entries of one Save, whose header ``preview`` has seen."""

    def __init__(self, preview: Preview, saving: Saving) -> None:
        self._preview = preview
        self._saving = saving

    def __call__(self, entries: Sequence[SaveEntry]) -> Iterator[Refusal | None]:
        """Check all entries. Several may be of one sequence; only the last of them may release it."""
        released: set[int] = set()
        for entry in entries:
            if entry.sequence_id in released:
                yield bad_request(f"sequence {entry.sequence_id} is listed after its release")
            if entry.release:
                released.add(entry.sequence_id)
            yield self._preview.check_distinct([entry.sequence_id])
            yield self._preview.check_known([entry.sequence_id])
            yield self._check_cuts(entry)
            yield check_keys([key for _, key in entry.cuts])
            if len(entry.kept_note) > MAX_NOTE_BYTES:
                yield bad_request(f"a note has at most {MAX_NOTE_BYTES} bytes. Given: {len(entry.kept_note)}")

    def _check_cuts(self, entry: SaveEntry) -> Refusal | None:
        if not entry.cuts:
            return bad_request("a run has at least one cut. Given: 0 cuts")
        cuts = [cut for cut, _ in entry.cuts]
        is_state = self._saving is Saving.WITH_STATE and cuts == [entry.start]
        if is_state:
            cuts = []
        if entry.start < 0 or any(cut <= before for before, cut in pairwise((entry.start, *cuts))):
            return bad_request(f"cuts must ascend from above start, {entry.start}")
        computed = self._preview.length(entry.sequence_id)
        if entry.end > computed:
            return Refusal(
                ShardError.WRONG_POSITION,
                f"sequence {entry.sequence_id} holds {computed} tokens. Given: a cut at {entry.end}",
            )
        held = self._preview.find(entry.sequence_id)
        spans = () if held is None else held.spans
        refusals = (check_border(spans, border) for border in (entry.start, *cuts))
        return next((refusal for refusal in refusals if refusal is not None), None)


class LoadCheck:
    """Checks the entries of one Load, whose header ``preview`` has seen."""

    def __init__(self, preview: Preview, runs: RunStore, limits: LayoutLimits, facts: ModelFile) -> None:
        self._preview = preview
        self._runs = runs
        self._limits = limits
        self._facts = facts
        self._check_media = MediaCheck(facts.media)

    @first_refusal
    def __call__(self, entry: LoadEntry) -> Iterator[Refusal | None]:
        """Check one entry."""
        if self._preview.find(entry.sequence_id) is not None:
            yield Refusal(ShardError.SEQUENCE_EXISTS, f"sequence {entry.sequence_id} is held already")
        yield check_adapter(entry.adapter, self._facts)
        yield self._check_copy(entry)
        yield self._check_tokens(entry)
        yield self._check_media(entry.media, entry.token_ids)
        yield check_keys([piece.key for piece in entry.slices])
        yield self._check_slices(entry)
        for piece in entry.slices:
            yield self._check_slice(piece)

    def _check_copy(self, entry: LoadEntry) -> Refusal | None:
        if entry.copy is None:
            return None
        if self._limits.layout is not KvLayout.UNIFIED:
            return bad_request(
                f"sequence {entry.sequence_id} cannot begin with cells of sequence {entry.copy.source_id}: "
                "loaded cells are shared only in the unified layout"
            )
        return self._preview.check_prefix(entry.copy, entry.adapter, may_cut=True)

    def _check_tokens(self, entry: LoadEntry) -> Refusal | None:
        tokens = entry.token_ids
        if not tokens:
            return bad_request("a sequence to load has no tokens")
        if (refusal := check_ids("token ids", tokens, self._facts.vocabulary_size)) is not None:
            return refusal
        if entry.end > self._limits.cells_per_sequence:
            return Refusal(
                ShardError.SEQUENCE_TOO_LONG,
                f"a sequence holds {self._limits.cells_per_sequence} tokens. Given: {entry.end}",
            )
        return None

    def _check_slices(self, entry: LoadEntry) -> Refusal | None:
        """Check that the slices follow each other from the first of its tokens to the last."""
        end = entry.start
        spans = held_spans(self._facts.media, entry.media, entry.start)
        cells = list(entry.slices)
        if self._limits.saving is Saving.WITH_STATE:
            last = cells.pop() if cells else None
            if last is None or not last.start == last.end == entry.end:
                return bad_request(f"the last slice must be the recurrent state at {entry.end}")
        for piece in cells:
            refusal = check_border(spans, piece.end)
            if refusal is not None:
                return refusal
            if piece.start != end or piece.end <= piece.start:
                return bad_request(f"a slice must begin at {end} and not be empty. Given: {piece.start} to {piece.end}")
            end = piece.end
        if end != entry.end:
            return bad_request(f"the slices must end at {entry.end}, with the tokens. Given: {end}")
        return None

    def _check_slice(self, piece: RunSlice) -> Refusal | None:
        run = self._runs.find(piece.key)
        if run is None:
            return None
        if not run.start <= piece.start <= piece.end <= run.end or (run.start < run.end) != (piece.start < piece.end):
            return bad_request(
                f"run {piece.key.hex()} has the cells {run.start} to {run.end}. Given: {piece.start} to {piece.end}"
            )
        return None
