"""Makes a model with weights of another type out of one, with the same vocabulary."""

import ctypes
from pathlib import Path

import llama_cpp

TYPES = {
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def requantise(source: Path, target: Path, weights: str = "Q4_0") -> Path:
    """Write the model of ``source`` with weights of a type in `TYPES`; return ``target``. Raises OSError."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = TYPES[weights]
    parameters.allow_requantize = True
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    if status != 0:
        message = f"llama.cpp cannot requantise {source.name}: status {status}"
        raise OSError(message)
    return target
