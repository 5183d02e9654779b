"""The toy backend: obeys every rule of llama.cpp's cache, needs no model file, and takes a configurable time per step.

A wrong position, a lost cell or a mixed-up sequence changes its next token, so that tests notice.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from caravan_models.contents import Contents, SeenFiles
from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_proto.messages.model import Numerics
from caravan_shard.adapter_file import AdapterFile
from caravan_shard.arrays import Floats, State
from caravan_shard.backends.base import (
    Capacity,
    CellSlice,
    DecodeOutcome,
    DraftBlock,
    DraftModel,
    FileContents,
    JointEmbed,
    TokenBatch,
)
from caravan_shard.backends.given_embeddings import EmbeddingsEncoder
from caravan_shard.backends.toy.media import ToyEncoder
from caravan_shard.backends.toy.model import (
    EMPTY_STATE,
    EOS,
    TOY_FACTS,
    ToyCache,
    ToyVocabulary,
    next_state,
    toy_logits,
)
from caravan_shard.media import CellSpan
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.joint_draw import leave_all
from caravan_shard.sampling.logprobs import leave_all_logprobs
from caravan_shard.sampling.top_candidates import StepCandidates

# Called before each forward pass, on the worker's thread; may block. An outcome other than None becomes that of the
# forward pass: ABORTED and FAILED leave half of the batch in the cache, as llama.cpp may.
DecodeHook = Callable[[TokenBatch], DecodeOutcome | None]


MAX_EMBED_TOKENS = 512
EMBEDDING_SIZE = 16
# Of an embedding in a prompt: the byte that it stands for.
TOY_INPUT_SIZE = 1
# What is said of the bytes of the toy, which has no file.
TOY_SHA256 = "toy-1"
TOY_STATES = "70" * 32


class ToyAdapters:
    """Loads any file but one that is called damaged."""

    def load(self, key: str, file: AdapterFile) -> str:
        """Return why a file cannot be used."""
        return f"the toy model cannot use {file.path}" if "damaged" in file.path.name else ""

    def unload(self, key: str) -> None:
        """Do nothing."""


class ToyBackend:
    """A Backend. A forward pass takes ``step_s`` plus ``token_s`` per token, in seconds."""

    layout_works = True
    keeps_drafts = True

    def __init__(
        self,
        *,
        cells: int = 8192,
        max_sequences: int = 8,
        max_batch_tokens: int = 2048,
        layout: KvLayout = KvLayout.UNIFIED,
        other_layouts: Sequence[KvLayout] = (),
        whole_only: bool = False,
        rollback_tokens: int = 0,
        max_prompt_logprob_tokens: int = 64,
        embedding_size: int = 0,
        ranks: bool = False,
        adapters: Sequence[str] = (),
        step_s: float = 0.0,
        token_s: float = 0.0,
        hook: DecodeHook | None = None,
        draft_model: DraftModel | None = None,
        media: ToyEncoder | EmbeddingsEncoder | None = None,
    ) -> None:
        """``other_layouts``: those that `set_layout` can give the cells. A model that only embeds has no sequences."""
        layouts = (layout, *other_layouts)
        self.media = media
        self.contents = FileContents(None, _model_of)
        self.contents.know(Contents(model=TOY_SHA256))
        self.contents.state_fingerprint = TOY_STATES
        self.facts = replace(TOY_FACTS, adapters=tuple(adapters), media=None if media is None else media.facts)
        self.vocabulary = ToyVocabulary()
        self.candidate_filter = filter_candidates
        self.joint_draw = leave_all
        self.joint_logprobs = leave_all_logprobs
        self.capacity = Capacity(
            layouts=tuple(
                replace(
                    _layout_limits(layout, cells, max_sequences, whole_only=whole_only), rollback_tokens=rollback_tokens
                )
                for layout in layouts
            ),
            max_sequences=max_sequences,
            max_batch_tokens=max_batch_tokens,
            max_prompt_logprob_tokens=max_prompt_logprob_tokens,
            embedding_size=embedding_size,
            input_size=TOY_INPUT_SIZE,
            max_embed_tokens=MAX_EMBED_TOKENS if embedding_size or ranks else 0,
            joint_embed=JointEmbed(texts=8, tokens=MAX_EMBED_TOKENS),
            ranks=ranks,
        )
        self.cache = self._new_cache()
        self.numerics = Numerics(
            fingerprint="70" * 8,
            exact=True,
            flash_attention={layout.value: False for layout in layouts},
            same_in_company=True,
            same_in_chunks=True,
        )
        self.hook = hook
        self.draft_model = draft_model
        self._step_s = step_s
        self._token_s = token_s
        self._logits: Floats = np.empty((0, TOY_FACTS.vocabulary_size), np.float32)

    def stand_for(self, files: SeenFiles) -> None:
        """Pretend to be loaded from ``files``."""
        self.contents = FileContents(files, _model_of)

    @property
    def block(self) -> DraftBlock | None:
        """As a draft model, it makes a token in each pass."""
        return None

    def readable(self, sequence_id: int) -> range:
        """Return all positions."""
        return range(self.capacity.current.cells)

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """Work like llama_decode, its rules for positions included."""
        tokens, positions = _tokens(batch), batch.positions.tolist()
        sequence_ids = batch.sequence_ids.tolist()
        forced = self.hook(batch) if self.hook is not None else None
        if self._step_s or self._token_s:
            time.sleep(self._step_s + self._token_s * len(tokens))
        is_cut = any(not rows.is_whole and self.facts.media.atomic for rows in batch.media if self.facts.media)
        if not tokens or len(tokens) > self.capacity.max_batch_tokens or is_cut:
            return DecodeOutcome.INVALID
        if not self._continues(sequence_ids, positions):
            return DecodeOutcome.INVALID
        if not self.cache.has_room(Counter(sequence_ids)):
            return DecodeOutcome.NO_KV
        if forced in (DecodeOutcome.NO_KV, DecodeOutcome.INVALID):
            return forced
        computed = len(tokens) if forced in (None, DecodeOutcome.OK) else len(tokens) // 2
        self.cache.computed = Counter(sequence_ids if computed == len(tokens) else ())
        states = []
        for row in range(computed):
            self.cache.append(sequence_ids[row], tokens[row], batch.adapter)
            if batch.outputs[row]:
                states.append(self.cache.state(sequence_ids[row]))
        self._logits = toy_logits(np.array(states, np.uint64))
        return forced or DecodeOutcome.OK

    def _continues(self, sequence_ids: list[int], positions: list[int]) -> bool:
        """Whether each sequence continues where it ended, without a gap."""
        expected: dict[int, int] = {}
        for sequence_id, position in zip(sequence_ids, positions, strict=True):
            if not 0 <= sequence_id < self.capacity.max_sequences:
                return False
            if position != expected.setdefault(sequence_id, self.cache.length(sequence_id)):
                return False
            expected[sequence_id] += 1
        return True

    def logits(self, rows: int) -> Floats:
        """Return [rows, vocabulary] of the last forward pass."""
        assert rows == len(self._logits), f"{rows} rows asked of {len(self._logits)}"
        return self._logits

    @property
    def gives_candidates(self) -> bool:
        """Whether it has candidates: never."""
        return False

    def candidates(self, rows: int) -> StepCandidates | None:
        """Return nothing: all logits are there."""
        assert rows == len(self._logits), f"{rows} rows asked of {len(self._logits)}"
        return None

    def length(self, sequence_id: int) -> int:
        """Return the number of tokens held."""
        return self.cache.length(sequence_id)

    def trim(self, sequence_id: int, length: int) -> bool:
        """Work like llama_memory_seq_rm to the end."""
        limits, back = self.capacity.current, self.cache.length(sequence_id) - length
        most = min(limits.rollback_tokens, self.cache.computed.pop(sequence_id, 0) - 1)
        if limits.whole_only and length and back > max(0, most):
            return False
        self.cache.trim(sequence_id, length)
        return True

    def clear_free_cells(self) -> None:
        """Do nothing: a sequence reads its own cells alone."""

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Work like llama_memory_seq_cp."""
        assert self.cache.length(destination_id) == 0, f"sequence {destination_id} holds tokens"
        self.cache.copy(source_id, destination_id, length)

    def save(self, sequence_id: int, start: int, end: int, most_bytes: int, *, releasing: bool) -> State | None:
        """Return the states of the cells, 8 bytes each, or as recurrent state that of the last one alone."""
        limits = self.capacity.current
        assert limits.saving is not Saving.NOTHING, "nothing can be saved"
        if start == end:
            assert limits.saving is Saving.WITH_STATE, "there is no recurrent state"
            assert end == self.length(sequence_id), "the recurrent state is that after all tokens"
            start -= 1
        states = np.array(self.cache.states(sequence_id, start, end), np.uint64).view(np.uint8)
        if releasing:
            # llama.cpp's cells may be changed then.
            self.cache.trim(sequence_id, 0)
        return states if states.nbytes <= most_bytes else None

    def restore(
        self,
        sequence_id: int,
        slices: Sequence[CellSlice],
        shared: PrefixCopy | None = None,
        spans: Sequence[CellSpan] = (),
    ) -> bool:
        """Give the sequence cells with the states of ``slices``, which are new but for those of ``shared``."""
        assert self.cache.length(sequence_id) == 0, f"sequence {sequence_id} holds tokens"
        last: CellSlice | None = None
        if self.capacity.current.saving is Saving.WITH_STATE:
            *slices, last = slices
            assert last.start == last.end == slices[-1].end, "the last slice is no recurrent state at the end"
            if last.state.nbytes != 8:
                return False
            shared = shared and replace(shared, length=min(shared.length, last.end - 1))
        known = shared.length if shared is not None and self.cache.layout is KvLayout.UNIFIED else 0
        first = min(known, slices[0].start)
        states: list[int] = []
        for one in slices:
            assert one.start == first + len(states) < one.end, f"{first + len(states)} cells before {one.start}"
            if one.state.nbytes % 8:
                return False
            found = one.state.view(np.uint64)[one.start - one.first : one.end - one.first].tolist()
            if len(found) != one.end - one.start:
                return False
            states += found
        if shared is not None and known:
            equal = states[: known - first]
            assert self.cache.states(shared.source_id, first, known) == equal, "the cells are not equal"
            self.cache.copy(shared.source_id, sequence_id, known)
        own = states[known - first :]
        if last is not None:
            own[-1] = int(last.state.view(np.uint64)[0])
        if not self.cache.put_back(sequence_id, own):
            self.cache.trim(sequence_id, 0)
            return False
        return True

    def set_layout(self, layout: KvLayout) -> bool:
        """Make the cache anew; in the old layout unless ``layout_works``."""
        assert self.capacity.limits(layout) is not None, f"{layout} is not possible"
        works = self.layout_works
        if works:
            self.capacity = self.capacity.moved_to(layout)
        self.cache = self._new_cache()
        return works

    def _new_cache(self) -> ToyCache:
        limits = self.capacity.current
        return ToyCache(limits.cells, limits.cells_per_sequence, limits.layout)

    def embed(self, texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
        """Return `toy_embedding` or `toy_relevance` of each text, after the time of a forward pass."""
        if self._step_s or self._token_s:
            time.sleep(self._step_s + self._token_s * sum(map(len, texts)))
        if self.capacity.ranks:
            return [np.array([toy_relevance(text)], np.float32) for text in texts]
        return [toy_embedding(text, self.capacity.embedding_size) for text in texts]

    @property
    def adapters(self) -> ToyAdapters:
        """What an adapter does follows from its key."""
        return ToyAdapters()

    def close(self) -> None:
        """Wait for the users of the model. There is nothing to free."""
        self.vocabulary.users.end()


def _tokens(batch: TokenBatch) -> list[int]:
    """Return the tokens, and those that media spell."""
    tokens: list[int] = batch.tokens.tolist()
    for rows in batch.media:
        spelled = rows.piece.embeddings[rows.first : rows.first + rows.cells, 0]
        tokens[rows.row : rows.row + rows.cells] = spelled.astype(int).tolist()
    return tokens


def _layout_limits(layout: KvLayout, cells: int, max_sequences: int, *, whole_only: bool) -> LayoutLimits:
    return LayoutLimits(
        layout=layout,
        cells=cells,
        cells_per_sequence=cells if layout is KvLayout.UNIFIED else cells // max_sequences,
        whole_only=whole_only,
        saving=Saving.WITH_STATE if whole_only else Saving.ANY,
    )


def toy_embedding(tokens: Sequence[int], size: int) -> Floats:
    """Return the toy embedding [size] of a text; it depends on every token and its position."""
    state = EMPTY_STATE
    for position, token in enumerate(tokens):
        state = next_state(state, token, position)
    vector = toy_logits(np.array([state], np.uint64))[0, 32 : 32 + size]
    normal: Floats = vector / np.linalg.norm(vector)
    return normal


def toy_relevance(tokens: Sequence[int]) -> float:
    """Return the share of the document's tokens that the query has too, for the tokens of a pair."""
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    query, document = set(tokens[1:end]), tokens[end + 1 :]
    return sum(token in query for token in document) / max(1, len(document))


def _model_of(contents: Contents) -> str:
    return contents.model
