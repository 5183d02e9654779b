"""Lets llama.cpp find the highest logits of rows where it computes them, so that the others stay there.

Each id of a sequence has a chain of llama.cpp's samplers, with the filter top_k and nothing else, while the sequences
that had the id lately needed no more. Another chain for any id makes llama.cpp reserve its graphs again, which takes as
long as some steps. So an id keeps its chain from one sequence to the next, and with too many candidates; it loses the
chain at once where all logits are needed, and gets one only after some steps that would have used it.
"""

from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from caravan_shard.backends.base import TokenBatch
from caravan_shard.sampling.top_candidates import TopCandidates, candidate_class

# Steps of an id that would have used candidates before it gets its chain.
PATIENCE = 8


class DeviceCandidates:
    """The chains of one context."""

    def __init__(self, context: Any, vocabulary_size: int, patience: int = PATIENCE) -> None:
        self._context = context
        self._vocabulary_size = vocabulary_size
        self._patience = patience
        self._chains: dict[int, tuple[int, Any]] = {}
        self._waited: dict[int, int] = {}
        # llama.cpp recognises a chain by its address, which must stay taken until it has built another graph.
        self._retired: list[Any] = []
        self._rows = np.empty(0, np.int32)
        self.changes = 0

    def prepare(self, batch: TokenBatch) -> None:
        """Set the chains for a forward pass."""
        self._rows = batch.sequence_ids[batch.outputs != 0]
        needed = np.zeros(len(self._rows), np.int32) if batch.candidates is None else batch.candidates
        wanted: dict[int, int] = {}
        for sequence_id, count in zip(self._rows.tolist(), needed.tolist(), strict=True):
            # llama.cpp lets a sequence with a chain have one output.
            wanted[sequence_id] = 0 if sequence_id in wanted else count
        ready = False
        for sequence_id, count in wanted.items():
            has = self._chains[sequence_id][0] if sequence_id in self._chains else 0
            if count == 0:
                self._waited.pop(sequence_id, None)
                if has:
                    self._set(sequence_id, 0)
            elif has == 0:
                self._waited[sequence_id] = self._waited.get(sequence_id, 0) + 1
                ready = ready or self._waited[sequence_id] > self._patience
            elif has < min(count, self._vocabulary_size):
                self._set(sequence_id, count)
        if ready:
            # All that wait, so that the graphs are reserved once.
            for sequence_id in [one for one in wanted if one in self._waited]:
                self._set(sequence_id, wanted[sequence_id])

    @property
    def count(self) -> int:
        """Outputs of the last forward pass that have candidates only."""
        return sum(not self.has_logits(row) for row in range(len(self._rows)))

    def free_retired(self) -> None:
        """Free the chains that no graph has any more, after a forward pass."""
        for chain in self._retired:
            llama_cpp.llama_sampler_free(chain)
        self._retired.clear()

    def has_logits(self, row: int) -> bool:
        """Whether all logits of a row are there."""
        return int(self._rows[row]) not in self._chains

    def of_row(self, row: int) -> TopCandidates | None:
        """Return the candidates of a row of the last forward pass; None where all logits are there instead."""
        if self.has_logits(row):
            return None
        index = row - len(self._rows)  # from the end, as outputs are counted, and not tokens
        count = int(llama_cpp.llama_get_sampled_candidates_count_ith(self._context, index))
        assert count > 1, f"llama.cpp found {count} candidates"
        ids = llama_cpp.llama_get_sampled_candidates_ith(self._context, index)
        logits = llama_cpp.llama_get_sampled_logits_ith(self._context, index)
        return TopCandidates(_copied(ids, count), _copied(logits, count), whole=count == self._vocabulary_size)

    def close(self) -> None:
        """Free the chains. The context must be gone if it has any."""
        self.free_retired()
        for _, chain in self._chains.values():
            llama_cpp.llama_sampler_free(chain)
        self._chains.clear()

    def _set(self, sequence_id: int, needed: int) -> None:
        self.changes += 1
        self._waited.pop(sequence_id, None)
        old = self._chains.pop(sequence_id, None)
        if old is not None:
            self._retired.append(old[1])
        if needed == 0:
            llama_cpp.llama_set_sampler(self._context, sequence_id, None)
            return
        size = min(candidate_class(needed), self._vocabulary_size)
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_k(size))
        if llama_cpp.llama_set_sampler(self._context, sequence_id, chain):
            self._chains[sequence_id] = size, chain
        else:
            self._retired.append(chain)


def _copied(pointer: Any, count: int) -> NDArray[Any]:
    return np.ctypeslib.as_array(pointer, (count,)).copy()
