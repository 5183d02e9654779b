"""Makes a model that computes faster out of another one, with the same vocabulary."""

import ctypes
from pathlib import Path

import llama_cpp


def requantise(source: Path, target: Path) -> Path:
    """Write the model of ``source`` with weights of type Q4_0; return ``target``. Raises OSError."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    parameters.allow_requantize = True
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    if status != 0:
        message = f"llama.cpp cannot requantise {source.name}: status {status}"
        raise OSError(message)
    return target
