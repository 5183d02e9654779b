"""What is made of the states of a text: a vector of length 1, or how relevant a document is."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.kernels.hidden_states import HiddenStates

# The graphs of these architectures end with a softmax over "yes" and "no".
_RANKS_BY_SOFTMAX = frozenset({"qwen3", "qwen3vl"})


class Pooling(Protocol):
    """What a pass over texts must output, and what is made of it."""

    def outputs(self, lengths: Sequence[int]) -> NDArray[np.int8]:
        """Return for each token of texts of ``lengths`` tokens whether it is an output of the pass."""
        ...

    def results(self, context: Any, lengths: Sequence[int]) -> list[Floats | None]:
        """Return a result for each text of the last pass of ``context``; None if it has none."""
        ...


class _ByLlama:
    """llama.cpp pools. It takes all tokens for outputs."""

    def outputs(self, lengths: Sequence[int]) -> NDArray[np.int8]:
        return np.ones(sum(lengths), np.int8)

    def results(self, context: Any, lengths: Sequence[int]) -> list[Floats | None]:
        pointers = (llama_cpp.llama_get_embeddings_seq(context, place) for place in range(len(lengths)))
        return [self._result(pointer) if pointer else None for pointer in pointers]

    def _result(self, pooled: Any) -> Floats | None:
        raise NotImplementedError


class Vectors(_ByLlama):
    """Vectors [size]."""

    def __init__(self, size: int) -> None:
        self._size = size

    def _result(self, pooled: Any) -> Floats | None:
        return _of_length_1(np.ctypeslib.as_array(pooled, (self._size,)))


class Relevances(_ByLlama):
    """The relevance [1] of the document of each pair. As in vLLM, an output without a range gets one by the logistic
    function."""

    def __init__(self, architecture: str) -> None:
        self._is_probability = architecture in _RANKS_BY_SOFTMAX

    def _result(self, pooled: Any) -> Floats | None:
        output = float(pooled[0])
        if not math.isfinite(output):
            return None
        return np.array([output if self._is_probability else 0.5 + 0.5 * math.tanh(0.5 * output)], np.float32)


class OfStates:
    """Vectors of the states that a pass leaves in ``states``: of the last token of a text, or the mean of all."""

    def __init__(self, states: HiddenStates, *, of_last: bool) -> None:
        self._states = states
        self._of_last = of_last

    def outputs(self, lengths: Sequence[int]) -> NDArray[np.int8]:
        """Return for each token whether it is an output, see `Pooling`."""
        wanted = np.full(sum(lengths), not self._of_last, np.int8)
        wanted[np.cumsum(lengths) - 1] = 1
        return wanted

    def results(self, _context: Any, lengths: Sequence[int]) -> list[Floats | None]:
        """Return a vector [size] for each text, see `Pooling`."""
        states = self._states.take(len(lengths) if self._of_last else sum(lengths))
        if states is None:
            return [None] * len(lengths)
        if self._of_last:
            return [_of_length_1(state) for state in states]
        ends = np.cumsum(lengths)
        # A sum has the direction of the mean.
        return [
            _of_length_1(states[end - length : end].sum(0, np.float64))
            for end, length in zip(ends, lengths, strict=True)
        ]


def _of_length_1(vector: NDArray[Any]) -> Floats | None:
    length = np.linalg.norm(vector.astype(np.float64))
    return (vector / length).astype(np.float32) if 0 < length < np.inf else None
