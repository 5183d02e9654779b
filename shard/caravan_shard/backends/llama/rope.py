"""Tells llama.cpp how positions are encoded."""

from typing import Any

import llama_cpp

from caravan_shard.rope_flags import RopeFlags

_SCALINGS: dict[str, int] = {
    "model": llama_cpp.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    "none": llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
}
# What llama.cpp takes for "as the file says".
_OF_THE_FILE = -1.0


_GRIDS = frozenset({llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE})


def position_dimensions(model: Any) -> int:
    """Return how many dimensions the position of an embedding has in a llama_model: 4 with M-RoPE."""
    return 4 if llama_cpp.llama_model_rope_type(model) in _GRIDS else 1


def set_rope(flags: RopeFlags, parameters: Any) -> None:
    """Set the fields of a ``llama_context_params``."""
    parameters.rope_scaling_type = _SCALINGS[flags.rope_scaling]
    parameters.rope_freq_base = flags.rope_freq_base or 0.0
    parameters.rope_freq_scale = flags.frequency_scale or 0.0
    parameters.yarn_orig_ctx = flags.yarn_orig_ctx or 0
    for field in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast"):
        value = getattr(flags, field)
        setattr(parameters, field, _OF_THE_FILE if value is None else value)
