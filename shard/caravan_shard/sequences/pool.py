"""Keeps the shard's sequences and the backend's cache in step with each other."""

import logging
from collections.abc import Iterable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.commands import Chunk, Header, LoadEntry, PrefixCopy, Row, SaveEntry
from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import State
from caravan_shard.backends.base import Backend, CellSlice, Vocabulary
from caravan_shard.constraints.matching import Matching, ThoughtMatching
from caravan_shard.media import NO_TOKEN, held_spans, spans_before, with_media
from caravan_shard.protocol.commands import PreparedParameters, StoredRun
from caravan_shard.sampling.feedback import make_feedback
from caravan_shard.sampling.penalties import make_biases, make_penalties
from caravan_shard.sampling.top_candidates import candidates_needed
from caravan_shard.sequences.runs import RunStore
from caravan_shard.sequences.sequence import Phase, Sequence, log_traced, used_cells
from caravan_shard.speculation.acceptance import KindAcceptance
from caravan_shard.speculation.drafter import Drafter, EndedTexts
from caravan_shard.speculation.model_drafter import ModelDrafter

_log = logging.getLogger(__name__)

_NO_LIMIT = 1 << 62


class SequencePool:
    """The held sequences by id. Callers have checked every argument."""

    def __init__(self, backend: Backend, runs: RunStore, drafter: ModelDrafter | None = None) -> None:
        """``drafter``: holds beginnings of the same sequences, and no others."""
        self.held: dict[int, Sequence] = {}
        # Those whose logits were NaN or infinite, so that their cells may be as well.
        self.spoiled: set[int] = set()
        self.runs = runs
        self._backend = backend
        self._births = count()
        self._kinds = KindAcceptance()
        self._drafter = drafter
        self._ended_texts = EndedTexts()

    @property
    def _limits(self) -> LayoutLimits:
        return self._backend.capacity.current

    @property
    def free_cells(self) -> int:
        """Cells no sequence holds."""
        return self._limits.cells - used_cells(self.held.values(), self._limits.layout)

    def apply(self, header: Header) -> None:
        """Carry out a command's header."""
        self.release(header.release)
        for sequence_id, length in header.park:
            self._park(sequence_id, length)
        self.runs.drop(header.drop_runs)
        self.runs.spill(header.spill_runs)

    def release(self, sequence_ids: Iterable[int], *, frees_cells: bool = True) -> None:
        """Forget sequences and free their cells, unless these end with the backend."""
        for sequence_id in sequence_ids:
            sequence = self.held.pop(sequence_id)
            if frees_cells:
                self._backend.trim(sequence_id, 0)
                self._keep_draft(sequence_id, 0)
            if sequence.phase is not Phase.ENDED:
                log_traced(sequence, "sequence released", computed=sequence.computed)
        if frees_cells and not self.spoiled <= self.held.keys():
            self.spoiled &= self.held.keys()
            self._backend.clear_free_cells()

    def clear(self, *, frees_cells: bool = True) -> None:
        """Forget every sequence. ``frees_cells``: as in `release`."""
        self.release(list(self.held), frees_cells=frees_cells)

    def make(self, chunk: Chunk) -> Sequence:
        """Make the new sequence of a first chunk. The pool changes only with `share` and after the step."""
        setup, vocabulary = chunk.setup, self._backend.vocabulary
        assert isinstance(setup, PreparedParameters)
        sequence = Sequence(
            sequence_id=chunk.sequence_id,
            parameters=setup,
            birth=next(self._births),
            own_start=chunk.start,
            computed=chunk.start,
            penalties=make_penalties(setup.sampling, lambda token: vocabulary.piece(token).data),
            biases=make_biases(setup.sampling.biases),
            feedback=make_feedback(setup.sampling, self._backend.facts.vocabulary_size, setup.feedback),
            matching=_make_matching(setup, vocabulary),
            drafter=self._make_drafter(setup) if setup.max_draft_tokens else None,
        )
        if not (
            setup.prompt_logprobs or setup.min_tokens or sequence.penalties or sequence.matching or sequence.drafter
        ):
            sequence.candidates = candidates_needed(setup.sampling)
        if chunk.copy is not None:
            source = self.held[chunk.copy.source_id]
            sequence.extend(source.tokens[: chunk.copy.length])
            sequence.spans = spans_before(source.spans, chunk.copy.length)
            self._inherit(sequence, chunk.copy)
        return sequence

    def _make_drafter(self, parameters: PreparedParameters) -> Drafter:
        return Drafter(parameters.prediction, self._kinds, self._ended_texts, parameters.draft_pool)

    def make_ended(self, row: Row) -> Sequence:
        """Make the new sequence of a row. The pool changes only with `share` and after the step."""
        return self._ended(row.sequence_id, (), row.adapter, row.copy)

    def keep_row(self, sequence: Sequence, row: Row) -> None:
        """Let a sequence keep what a row has computed behind it, as far as the row says."""
        if sequence.phase is not Phase.ENDED:
            self.cut_back(row.sequence_id, row.start)
            return
        if sequence.computed == sequence.own_start:
            # It may have held other cells of its own at these positions, which others still hold.
            sequence.inherited, sequence.birth = sequence.ranges(), next(self._births)
        del sequence.tokens[row.start :]
        sequence.tokens.extend(with_media(row.token_ids, row.media))
        sequence.spans += held_spans(self._backend.facts.media, row.media, row.start)
        sequence.computed = row.end
        if row.kept == 0:
            self.release([row.sequence_id])
        elif row.kept < row.end:
            self._park(row.sequence_id, row.kept)

    def has_room(self, sequences: Iterable[Sequence], tokens: int) -> bool:
        """Whether ``tokens`` more fit beside the held sequences. ``sequences`` replace held ones with their ids."""
        after = self.held | {sequence.sequence_id: sequence for sequence in sequences}
        return used_cells(after.values(), self._limits.layout) + tokens <= self._limits.cells

    def share(self, chunks: Iterable[Chunk | Row]) -> None:
        """Make the copies of first chunks and of rows, then cut back the sequences that are taken over.

        In this order, every copy sees its source as it was before.
        """
        copies = [(chunk.sequence_id, chunk.copy) for chunk in chunks if chunk.copy is not None]
        for sequence_id, copy in copies:
            if copy.source_id != sequence_id:
                self._backend.copy(copy.source_id, sequence_id, copy.length)
                if self._drafter is not None:
                    self._drafter.copy(copy.source_id, sequence_id, copy.length)
                self._expect(sequence_id, copy.length)
        for sequence_id, copy in copies:
            if copy.source_id == sequence_id and copy.length < self.held[sequence_id].computed:
                self._park(sequence_id, copy.length)

    def cut_back(self, sequence_id: int, length: int) -> None:
        """Undo a failed step: cut the cache back to ``length`` tokens of this id."""
        self._keep_draft(sequence_id, length if sequence_id in self.held else 0)
        if sequence_id not in self.held:
            self._backend.trim(sequence_id, 0)
        elif self._backend.length(sequence_id) != length and not (
            self._backend.trim(sequence_id, length) and self._backend.length(sequence_id) == length
        ):
            trace_id = self.held[sequence_id].parameters.trace_id
            traced = {"trace_id": trace_id} if trace_id else {}
            _log.error("a sequence could not be cut back and is lost", extra={"sequence": sequence_id, **traced})
            self.release([sequence_id])

    def forget_rejected(self, sequence: Sequence) -> None:
        """Cut a sequence back to the tokens that it has but for the last, which is not computed."""
        if sequence.computed >= len(sequence.tokens):
            sequence.computed = len(sequence.tokens) - 1
            self.cut_back(sequence.sequence_id, sequence.computed)

    def save(self, entry: SaveEntry) -> int | None:
        """Save a run if possible, and release the sequence if asked to; return the size of the run in bytes."""
        size = self._save(entry)
        if entry.release:
            self.release([entry.sequence_id])
        return size

    def _save(self, entry: SaveEntry) -> int | None:
        end, key = entry.cuts[-1]
        known = self.runs.find(key)
        if known is not None:
            return known.size
        if self._limits.saving is Saving.NOTHING or self.runs.memory_room <= 0:
            return None
        if entry.is_state and end != self.held[entry.sequence_id].computed:
            return None  # it has grown since the router decided
        state = self._backend.save(entry.sequence_id, entry.start, end, self.runs.memory_room, releasing=entry.release)
        if state is None:
            return None
        cuts, keys = zip(*entry.cuts, strict=True)
        run = StoredRun(start=entry.start, cuts=cuts, keys=keys, size=state.nbytes, note=entry.kept_note)
        self.runs.put(run, state)
        return state.nbytes

    def adopt(self, run: StoredRun, state: State) -> bool:
        """Keep a run of another shard; False if there is no room for it."""
        if self.runs.find(run.key) is not None:
            return True
        if run.size > self.runs.memory_room:
            return False
        self.runs.put(run, state)
        return True

    def load(self, entry: LoadEntry) -> list[bytes] | None:
        """Make an ended sequence of saved runs. Return None if it is held now, else the keys of its bad runs."""
        found = {piece.key: self.runs.read(piece.key) for piece in entry.slices}
        kept = {key: one for key, one in found.items() if one is not None}
        sequence = self._ended(entry.sequence_id, with_media(entry.token_ids, entry.media), entry.adapter, entry.copy)
        sequence.spans += held_spans(self._backend.facts.media, entry.media, entry.start)
        if len(kept) < len(found) or self._limits.saving is Saving.NOTHING or not self.has_room([sequence], 0):
            return [key for key in found if key not in kept]
        slices = [
            CellSlice(state=state, first=run.start, start=piece.start, end=piece.end)
            for piece in entry.slices
            for run, state in (kept[piece.key],)
        ]
        restored = self._backend.restore(entry.sequence_id, slices, entry.copy, sequence.spans)
        if not restored or self._backend.length(entry.sequence_id) != entry.end:
            # There is room, so the content of a run is not what its key promises.
            self._backend.trim(entry.sequence_id, 0)
            self.runs.drop(kept)
            return list(kept)
        self.held[entry.sequence_id] = sequence
        return None

    def _ended(self, sequence_id: int, tokens: Iterable[int], adapter: str, copy: PrefixCopy | None) -> Sequence:
        """Make an ended sequence that holds ``copy``, if there is one, and ``tokens`` behind it."""
        source = None if copy is None else self.held[copy.source_id]
        copied = [] if source is None or copy is None else source.tokens[: copy.length]
        length = len(known := [*copied, *tokens])
        parameters = PreparedParameters(
            sampling=SamplingParams(temperature=0.0), prompt_length=length, max_length=length + 1, adapter=adapter
        )
        sequence = Sequence(
            sequence_id=sequence_id,
            parameters=parameters,
            birth=next(self._births),
            own_start=len(copied),
            tokens=known,
            computed=length,
            phase=Phase.ENDED,
        )
        if source is not None and copy is not None:
            sequence.spans = spans_before(source.spans, copy.length)
            self._inherit(sequence, copy)
        return sequence

    def set_layout(self, layout: KvLayout) -> list[int]:
        """Give the cells another layout, with all sequences in them. Return the ids of those that are lost.

        Where cells are shared, each begins with the cells of one with a lower id, as far as their tokens are equal. The
        router counts on that, since the reply says so.
        """
        held = sorted(self.held.values(), key=lambda sequence: sequence.sequence_id)
        states = [self._slices_to_move(sequence) for sequence in held]
        self._backend.set_layout(layout)
        limits, lost, restored = self._limits, list[int](), list[Sequence]()
        shares = limits.shares_cells and not limits.whole_only and limits.saving is Saving.ANY
        for sequence, slices in zip(held, states, strict=True):
            shared = _equal_beginning(sequence, restored) if shares else None
            sequence.birth, sequence.inherited, sequence.own_start = next(self._births), (), 0
            if shared is not None:
                sequence.own_start = shared.length
                self._inherit(sequence, shared)
            if not slices or not self._backend.restore(
                sequence.sequence_id, slices, shared=shared, spans=sequence.spans
            ):
                lost.append(sequence.sequence_id)
                self._backend.trim(sequence.sequence_id, 0)
                log_traced(sequence, "sequence lost with the layout")
                del self.held[sequence.sequence_id]
                self._keep_draft(sequence.sequence_id, 0)
            else:
                self._expect(sequence.sequence_id, sequence.computed)
                restored.append(sequence)
        if lost:
            _log.warning("sequences are lost with the layout", extra={"sequences": len(lost)})
        return lost

    def _slices_to_move(self, sequence: Sequence) -> list[CellSlice]:
        """Take a sequence out of the cache. Return what it can be restored from; nothing if it cannot."""
        saving, length = self._limits.saving, sequence.computed
        # The state comes first, since the cells may be changed when they are taken out.
        starts = {Saving.NOTHING: (), Saving.ANY: (0,), Saving.WITH_STATE: (length, 0)}[saving]
        slices: list[CellSlice] = []
        for start in starts:
            state = self._backend.save(sequence.sequence_id, start, length, _NO_LIMIT, releasing=start == 0)
            if state is None:
                return []
            slices.insert(0, CellSlice(state=state, first=start, start=start, end=length))
        return slices

    def _inherit(self, sequence: Sequence, prefix: PrefixCopy) -> None:
        """Record the cells of a copied prefix: those of the source if unified, new ones if split."""
        if self._limits.layout is KvLayout.UNIFIED:
            sequence.inherited = self.held[prefix.source_id].ranges_up_to(prefix.length)
        else:
            sequence.own_start = 0

    def _park(self, sequence_id: int, length: int) -> None:
        sequence = self.held[sequence_id]
        if sequence.phase is not Phase.ENDED:
            log_traced(sequence, "sequence parked", kept=length)
        sequence.park(length)
        self.cut_back(sequence_id, length)

    def _keep_draft(self, sequence_id: int, length: int) -> None:
        if self._drafter is not None:
            self._drafter.keep(sequence_id, length)

    def _expect(self, sequence_id: int, length: int) -> None:
        held = self._backend.length(sequence_id)
        assert held == length, f"sequence {sequence_id} holds {held} tokens, not {length}"


def _equal_beginning(sequence: Sequence, others: Iterable[Sequence]) -> PrefixCopy | None:
    """Return which first cells of the ``others`` may be those of ``sequence``, the last one and media excepted."""
    tokens = np.array(sequence.tokens[: sequence.computed - 1], np.int32)
    tokens = tokens[: _first(tokens == NO_TOKEN)]
    best: PrefixCopy | None = None
    for other in others:
        if other.parameters.adapter == sequence.parameters.adapter:
            theirs = np.array(other.tokens[: min(other.computed, len(tokens))], np.int32)
            length = _first(theirs != tokens[: len(theirs)])
            if length > (0 if best is None else best.length):
                best = PrefixCopy(source_id=other.sequence_id, length=length)
    return best


def _first(flags: NDArray[np.bool_]) -> int:
    """Return the place of the first one that is set, or how many there are."""
    return int(flags.argmax()) if flags.any() else len(flags)


def _make_matching(parameters: PreparedParameters, vocabulary: Vocabulary) -> Matching | ThoughtMatching | None:
    matching = None if parameters.grammar is None else Matching(parameters.grammar)
    if parameters.thought is None:
        return matching
    return ThoughtMatching(parameters.thought, matching, lambda token: vocabulary.piece(token).data)
