"""The filters by llama.cpp's samplers, which sort large vocabularies far faster than numpy."""

import ctypes
import threading
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats, Ids

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
assert _TOKEN_DATA.itemsize == ctypes.sizeof(llama_cpp.llama_token_data)


class LlamaFilter:
    """A CandidateFilter. Each thread has its own buffer and each call its own chain, since some samplers keep state."""

    def __init__(self, vocabulary_size: int) -> None:
        self._indices: Ids = np.arange(vocabulary_size, dtype=np.int32)
        self._local = threading.local()

    def __call__(self, logits: Floats, parameters: SamplingParams) -> Ids:
        """Return the indices of ``logits`` [candidates] that the chain leaves."""
        buffer = self._buffer()
        count = len(logits)
        buffer["id"][:count] = self._indices[:count]
        buffer["logit"][:count] = logits
        candidates = llama_cpp.llama_token_data_array(
            data=ctypes.cast(buffer.ctypes.data, llama_cpp.llama_token_data_p),
            size=count,
            selected=-1,
            sorted=False,
        )
        chain = _make_chain(parameters)
        llama_cpp.llama_sampler_apply(chain, ctypes.byref(candidates))
        llama_cpp.llama_sampler_free(chain)
        # XTC cuts the beginning off.
        start = (ctypes.addressof(candidates.data.contents) - buffer.ctypes.data) // _TOKEN_DATA.itemsize
        left: Ids = buffer["id"][start : start + candidates.size].copy()
        return left

    def _buffer(self) -> NDArray[np.void]:
        buffer: NDArray[np.void] | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = np.empty(len(self._indices), _TOKEN_DATA)
        return buffer


def _make_chain(parameters: SamplingParams) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    if parameters.top_k > 0:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_k(parameters.top_k))
    if parameters.typical_p < 1.0:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_typical(parameters.typical_p, 1))
    if parameters.top_p < 1.0:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_p(parameters.top_p, 1))
    if parameters.min_p > 0.0:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_min_p(parameters.min_p, 1))
    if parameters.xtc_probability > 0.0:
        # The draw was made with (seed, position): apply it always, so that the sampler's own seed has no effect.
        always, seed = 1.0, 0
        llama_cpp.llama_sampler_chain_add(
            chain, llama_cpp.llama_sampler_init_xtc(always, parameters.xtc_threshold, 1, seed)
        )
    return chain
