"""The toy backend: obeys every rule of llama.cpp's cache, needs no model file, and takes a configurable time per step.

A wrong position, a lost cell or a mixed-up sequence changes its next token, so that tests notice.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from caravan_shard.arrays import Floats, State
from caravan_shard.backends.base import Capacity, DecodeOutcome, Prefix, PrefixSharing, Saving, TokenBatch
from caravan_shard.backends.toy.cache import EMPTY_STATE, ToyCache, next_state
from caravan_shard.backends.toy.model import TOY_FACTS, ToyVocabulary, toy_logits
from caravan_shard.kv_layout import KvLayout
from caravan_shard.sampling.filters import filter_candidates

# Called before each forward pass, on the worker's thread; may block. An outcome other than None becomes that of the
# forward pass: ABORTED and FAILED leave half of the batch in the cache, as llama.cpp may.
DecodeHook = Callable[[TokenBatch], DecodeOutcome | None]


MAX_EMBED_TOKENS = 512
EMBEDDING_SIZE = 16


class ToyBackend:
    """A Backend. A forward pass takes ``step_s`` plus ``token_s`` per token, in seconds."""

    def __init__(
        self,
        *,
        cells: int = 8192,
        max_sequences: int = 8,
        max_batch_tokens: int = 2048,
        layout: KvLayout = KvLayout.UNIFIED,
        sharing: PrefixSharing = PrefixSharing.ANY,
        max_prompt_logprob_tokens: int = 64,
        embedding_size: int = 0,
        adapters: Sequence[str] = (),
        step_s: float = 0.0,
        token_s: float = 0.0,
        hook: DecodeHook | None = None,
    ) -> None:
        saves_suffixes = layout is KvLayout.UNIFIED and sharing is PrefixSharing.ANY
        per_sequence = cells if layout is KvLayout.UNIFIED else cells // max_sequences
        self.facts = replace(TOY_FACTS, adapters=tuple(adapters))
        self.vocabulary = ToyVocabulary()
        self.candidate_filter = filter_candidates
        self.capacity = Capacity(
            cells=cells,
            cells_per_sequence=per_sequence,
            max_sequences=max_sequences,
            max_batch_tokens=max_batch_tokens,
            layout=layout,
            sharing=sharing,
            saving=Saving.SUFFIXES if saves_suffixes else Saving.WHOLE_ONLY,
            max_prompt_logprob_tokens=max_prompt_logprob_tokens,
            embedding_size=embedding_size,
            max_embed_tokens=min(MAX_EMBED_TOKENS, max_batch_tokens) if embedding_size else 0,
        )
        self.cache = ToyCache(cells, per_sequence, layout)
        self.hook = hook
        self._step_s = step_s
        self._token_s = token_s
        self._logits: Floats = np.empty((0, TOY_FACTS.vocabulary_size), np.float32)

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """Work like llama_decode, its rules for positions included."""
        tokens, positions = batch.tokens.tolist(), batch.positions.tolist()
        sequence_ids = batch.sequence_ids.tolist()
        forced = self.hook(batch) if self.hook is not None else None
        if self._step_s or self._token_s:
            time.sleep(self._step_s + self._token_s * len(tokens))
        if not tokens or len(tokens) > self.capacity.max_batch_tokens or not self._continues(sequence_ids, positions):
            return DecodeOutcome.INVALID
        if not self.cache.has_room(Counter(sequence_ids)):
            return DecodeOutcome.NO_KV
        if forced in (DecodeOutcome.NO_KV, DecodeOutcome.INVALID):
            return forced
        computed = len(tokens) if forced in (None, DecodeOutcome.OK) else len(tokens) // 2
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

    def length(self, sequence_id: int) -> int:
        """Return the number of tokens held."""
        return self.cache.length(sequence_id)

    def trim(self, sequence_id: int, length: int) -> bool:
        """Work like llama_memory_seq_rm to the end."""
        if self.capacity.sharing is PrefixSharing.WHOLE_ONLY and 0 < length < self.cache.length(sequence_id):
            return False
        self.cache.trim(sequence_id, length)
        return True

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Work like llama_memory_seq_cp."""
        assert self.cache.length(destination_id) == 0, f"sequence {destination_id} holds tokens"
        self.cache.copy(source_id, destination_id, length)

    def save(self, sequence_id: int, start: int, most_bytes: int) -> State | None:
        """Work like llama_memory_seq_rm up to ``start``, then llama_state_seq_get_data."""
        assert start == 0 or self.capacity.saving is Saving.SUFFIXES, "only whole sequences can be saved"
        states = np.array(self.cache.take_out(sequence_id, start), np.uint64).view(np.uint8)
        return states if states.nbytes <= most_bytes else None

    def restore(self, sequence_id: int, state: State, prefix: Prefix | None) -> bool:
        """Work like llama_state_seq_set_data, then llama_memory_seq_cp."""
        assert self.cache.length(sequence_id) == 0, f"sequence {sequence_id} holds tokens"
        if not self.cache.put_back(sequence_id, state.view(np.uint64).tolist()):
            return False
        if prefix is not None:
            self.cache.copy(prefix.source_id, sequence_id, prefix.length)
        return True

    def embed(self, tokens: Sequence[int]) -> Floats | None:
        """Return `toy_embedding`, after the time of a forward pass."""
        if self._step_s or self._token_s:
            time.sleep(self._step_s + self._token_s * len(tokens))
        return toy_embedding(tokens, self.capacity.embedding_size)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def toy_embedding(tokens: Sequence[int], size: int) -> Floats:
    """Return the toy embedding [size] of a text; it depends on every token and its position."""
    state = EMPTY_STATE
    for position, token in enumerate(tokens):
        state = next_state(state, token, position)
    vector = toy_logits(np.array([state], np.uint64))[0, 32 : 32 + size]
    normal: Floats = vector / np.linalg.norm(vector)
    return normal
