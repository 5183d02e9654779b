"""Forward passes on one context of llama.cpp, and the logits that they leave."""

import ctypes
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Capacity, DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.batch import LlamaBatch, outcome_of
from caravan_shard.backends.llama.heads.head import LlamaHead
from caravan_shard.backends.llama.media.passes import MediaPass, media_passes
from caravan_shard.backends.llama.memory.context import OpenContext, position_dimensions
from caravan_shard.backends.llama.model.adapters import LlamaAdapters
from caravan_shard.backends.llama.sampling.candidates import DeviceCandidates
from caravan_shard.sampling.top_candidates import StepCandidates


class LlamaForward:
    """``ubatch``: most tokens that llama.cpp computes at once."""

    def __init__(self, opened: OpenContext, adapters: LlamaAdapters, capacity: Capacity, vocabulary_size: int) -> None:
        adapters.forget_context()
        self._opened = opened
        self._last: TokenBatch | None = None
        self._device: DeviceCandidates | None = None
        self._head: LlamaHead | None = None
        self._adapters = adapters
        self._max_sequences = capacity.max_sequences
        self._most_outputs = capacity.max_sequences + capacity.max_prompt_logprob_tokens
        self._batch = LlamaBatch(capacity.max_batch_tokens)
        self.ubatch = int(llama_cpp.llama_n_ubatch(opened.context))
        self._dimensions = position_dimensions(llama_cpp.llama_get_model(opened.context))
        # The logits of the last step if it had media.
        self._gathered: Floats | None = None
        self._logits_address = 0
        self._logits: Floats = np.empty((0, vocabulary_size), np.float32)

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """Run llama_decode, more than once with media, and wait for the logits.

        Once it is OK, the memory knows of the rows.
        """
        outputs = batch.output_count
        assert outputs <= self._most_outputs, f"{outputs} outputs of {self._most_outputs}"
        self._last = batch
        self._gathered = None
        if self._device is not None:
            self._device.prepare(batch)
        self._adapters.apply(self._opened.context, batch.adapter)
        if batch.media:
            return self._decode_media(batch, outputs)
        outcome = self._call(batch)
        if outcome is DecodeOutcome.OK:
            self._note(batch)
        return outcome

    def _decode_media(self, batch: TokenBatch, outputs: int) -> DecodeOutcome:
        """Run the passes that a step with media takes, and gather their logits."""
        gathered = np.empty((outputs, self._logits.shape[1]), np.float32)
        for one in media_passes(batch):
            own = one.batch.output_count
            outcome = self._call_media(one) if one.batch.media else self._call(one.batch)
            if outcome is not DecodeOutcome.OK:
                return outcome
            self._note(one.batch)
            if own:
                gathered[one.rows[batch.outputs != 0]] = self.logits(own)
        self._gathered = gathered
        return DecodeOutcome.OK

    def _note(self, batch: TokenBatch) -> None:
        """Let those know who depend on what was computed."""
        self._opened.memory.after_decode(batch)
        if self._head is not None:
            self._head.note(batch, self._opened.context)

    def _call_media(self, one: MediaPass) -> DecodeOutcome:
        """Compute rows that have embeddings."""
        batch, context = one.batch, self._opened.context
        positions = self._opened.memory.places.positions(batch)
        planes = np.tile(positions, (self._dimensions, 1))
        for rows in batch.media:
            if rows.piece.planes is not None:
                own = slice(rows.row, rows.row + rows.cells)
                planes[:, own] = 0  # the last dimension of a picture
                planes[: len(rows.piece.planes), own] = rows.piece.planes + positions[rows.row]
        embeddings = np.concatenate(
            [rows.piece.embeddings[rows.first : rows.first + rows.cells] for rows in batch.media]
        )
        struct = self._batch.fill_media(batch, planes, embeddings)
        if one.causal:
            return self._run(struct)
        llama_cpp.llama_set_causal_attn(context, False)
        try:
            return self._run(struct)
        finally:
            llama_cpp.llama_set_causal_attn(context, True)

    def _call(self, batch: TokenBatch) -> DecodeOutcome:
        """Compute rows that have tokens."""
        return self._run(self._batch.fill(batch, self._opened.memory.places.positions(batch)))

    def _run(self, struct: Any) -> DecodeOutcome:
        outcome = outcome_of(llama_cpp.llama_decode(self._opened.context, struct))
        llama_cpp.llama_synchronize(self._opened.context)
        if self._device is not None and outcome is DecodeOutcome.OK:
            self._device.free_retired()
        return outcome

    def use_head(self, head: LlamaHead) -> None:
        """Compute hidden states, too, from now on, and give them to ``head``."""
        self._head = head
        head.follow(self._opened)

    def use_device(self, device: DeviceCandidates) -> None:
        """Let the batches get candidates from now on, where they say that these suffice."""
        self._device = device

    def leave_device(self) -> None:
        """Let all batches get all logits from now on, as the last one did."""
        assert self.without_logits is None, "the last step has candidates"
        self.close()
        self._device = None

    @property
    def gives_candidates(self) -> bool:
        """Whether batches may get candidates."""
        return self._device is not None

    @property
    def without_logits(self) -> TokenBatch | None:
        """The last batch, if any of its outputs has candidates only."""
        return self._last if self._device is not None and self._device.count else None

    def candidates(self, rows: int) -> StepCandidates | None:
        """Return the candidates of the last step, unless all logits are there."""
        if self._device is None or not self._device.count:
            return None
        return StepCandidates([self._device.of_row(row) for row in range(rows)], self._own_logits(rows))

    def close(self) -> None:
        """Free what the context needed. It must be gone, or have computed a step without candidates."""
        if self._device is not None:
            self._device.close()

    def logits(self, rows: int) -> Floats:
        """Return [rows, vocabulary]; a view of llama.cpp's own buffer unless the last step had media."""
        return self._own_logits(rows) if self._gathered is None else self._gathered[:rows]

    def _own_logits(self, rows: int) -> Floats:
        pointer = llama_cpp.llama_get_logits(self._opened.context)
        assert pointer, "the last forward pass had no outputs"
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_address or rows > len(self._logits):
            # The buffer has room for n_seq_max rows at least, and never shrinks.
            shape = (max(rows, self._max_sequences), self._logits.shape[1])
            self._logits = np.ctypeslib.as_array(pointer, shape)
            self._logits_address = address
        return self._logits[:rows]
