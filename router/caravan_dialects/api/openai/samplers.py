"""The field ``samplers``: which samplers are used, and in which order, by llama-server's names."""

from collections.abc import Sequence
from typing import Any

from caravan_dialects.api.openai.rules import repeated_sampler_error, unknown_sampler_error
from caravan_proto.messages.sampling import SAMPLERS, switched_off

# llama-server's sampler for filling in, which has no effect here; and one that comes last wherever it stands.
_APART = ("infill", "adaptive_p")
_KNOWN = (*SAMPLERS, *_APART)
# llama-server also takes "top-k" and "topk" for "top_k", and so on.
_NAMES = {
    **{name.replace("_", ""): name for name in _KNOWN},
    "typicalp": "typ_p", "typ": "typ_p", "nucleus": "top_p", "temp": "temperature",
}  # fmt: skip


def order_of(field: str, samplers: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of all samplers: those of ``samplers`` in their order, then the others; () for None.

    Raises ValidationError.
    """
    if samplers is None:
        return ()
    used = [name for name in _named(field, samplers) if name not in _APART]
    return tuple(used) + tuple(name for name in SAMPLERS if name not in used)


def left_out(samplers: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields that switch off every sampler but ``samplers``; none for None. Raises ValidationError."""
    if samplers is None:
        return {}
    used = _named("samplers", samplers)
    off = switched_off(name for name in SAMPLERS if name not in used)
    # None would mean the request's own.
    return off if "adaptive_p" in used else {**off, "adaptive_target": -1.0}


def _named(field: str, samplers: Sequence[str]) -> list[str]:
    named: list[str] = []
    for given in samplers:
        name = _NAMES.get(given.lower().replace("_", "").replace("-", ""))
        if name is None:
            raise unknown_sampler_error(field, _KNOWN, given)
        if name in named:
            raise repeated_sampler_error(field, given)
        named.append(name)
    return named
