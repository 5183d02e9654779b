"""Random weights in the blocks of llama.cpp's quantised types, which take no quantising: their bytes are drawn."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

# What is drawn once; tensors are made of its repetitions, each from a place of its own.
_POOL_BYTES = 32 << 20
_SAMPLE_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class _Factor:
    """A factor of 16 bits at a byte of each block, ``times`` the block's scale."""

    at: int
    times: float = 1.0


# All other bytes of a block may have any value. With these factors, the mean of the weights is 0 or next to it: Q4_K
# has a minimum, of which a block subtracts as much as its values have in the mean.
_FACTORS = {
    GGMLQuantizationType.Q4_0: (_Factor(0),),
    GGMLQuantizationType.Q8_0: (_Factor(0),),
    GGMLQuantizationType.Q4_K: (_Factor(0), _Factor(2, 7.5)),
    GGMLQuantizationType.Q6_K: (_Factor(208),),
}


class RandomWeights:
    """Blocks of one type, whose weights have a standard deviation of ``spread``. The same seed draws the same ones."""

    def __init__(self, kind: GGMLQuantizationType, spread: float, seed: int) -> None:
        self._kind = kind
        self._block_weights, self._block_bytes = GGML_QUANT_SIZES[kind]
        self._random = np.random.default_rng(seed)
        self._pool = self._drawn(spread)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of ``columns`` weights."""
        assert columns % self._block_weights == 0, f"{columns} columns are no whole blocks of {self._kind.name}"
        return columns // self._block_weights * self._block_bytes

    def matrix(self, *shape: int) -> Bytes:
        """Return the bytes of a tensor whose rows have ``shape[-1]`` weights."""
        rows = (*shape[:-1], self.row_bytes(shape[-1]))
        data = np.empty(int(np.prod(rows)), np.uint8)
        flat = self._pool.reshape(-1)
        place, at = 0, int(self._random.integers(len(self._pool))) * self._block_bytes
        while place < len(data):
            part = flat[at : at + len(data) - place]
            data[place : place + len(part)] = part
            place, at = place + len(part), 0
        return data.reshape(rows)

    def _drawn(self, spread: float) -> Bytes:
        blocks = _POOL_BYTES // self._block_bytes
        pool = np.frombuffer(self._random.bytes(blocks * self._block_bytes), np.uint8).copy()
        pool = pool.reshape(blocks, self._block_bytes)
        self._scale(pool, 1.0)
        unscaled = float(dequantize(pool[:_SAMPLE_BLOCKS], self._kind).std())
        self._scale(pool, spread / unscaled)
        return pool

    def _scale(self, pool: Bytes, scale: float) -> None:
        for factor in _FACTORS[self._kind]:
            pool[:, factor.at : factor.at + 2] = np.array([scale * factor.times], np.float16).view(np.uint8)
