"""Applies the samplers in an order that a request asks for.

What follows each other as in the default order is one run, which costs what the default order costs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SAMPLER_PARAMETERS, SamplingParams, switched_off
from caravan_shard.arrays import Floats
from caravan_shard.sampling.penalties import Penalty
from caravan_shard.sampling.token_candidates import FAR, CandidateFilter, filtered, scale

DEFAULT_ORDER = tuple(SAMPLER_PARAMETERS)
# The values that switch off each sampler but the penalties, which are objects of their own.
_OFF: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: switched_off([name]) for name in DEFAULT_ORDER if name not in {"penalties", "dry"}}
)
# A lower temperature is greedy: dividing by it may overflow float32.
_GREEDY_TEMPERATURE = 1e-6


def temperature_of(logits: Floats, parameters: SamplingParams) -> float:
    """Return the temperature for ``logits`` [candidates], as llama.cpp's sampler computes it; at least 0.

    Without a ``dynatemp_range`` it is ``temperature``. Otherwise it lies within this range around ``temperature``, by
    the entropy of the candidates as a share of the highest that so many can have, to the power of
    ``dynatemp_exponent``. NaN if the logits are.
    """
    reach = parameters.dynatemp_range
    if reach == 0.0 or len(logits) < 2:
        return parameters.temperature
    relative = logits.astype(np.float64) - float(logits.max())
    weights = np.exp(relative)
    total = float(weights.sum())
    # -sum(p log p), where p = weight / total. A weight of 0 counts nothing, even if its logarithm is infinite.
    entropy = math.log(total) - float(weights @ np.maximum(relative, -1e3)) / total
    share: float = min(1.0, max(0.0, entropy / math.log(len(logits)))) ** parameters.dynatemp_exponent
    low = max(0.0, parameters.temperature - reach)
    return low + (parameters.temperature + reach - low) * share


def apply_in_order(
    logits: Floats,
    allowed: NDArray[np.intp] | None,
    parameters: SamplingParams,
    penalties: Sequence[Penalty],
    candidate_filter: CandidateFilter,
) -> tuple[NDArray[np.intp], Floats]:
    """Return the tokens that may be drawn, ascending ids, and their logits for the draw, none of which is above 0.

    ``logits`` [vocabulary] are those before the first sampler. ``allowed``: the ascending ids of the candidates; None
    for all. ``parameters.order`` has the samplers; XTC was drawn.
    """
    tokens = np.arange(len(logits)) if allowed is None else allowed
    values = logits if allowed is None else logits[allowed]
    named = {penalty.sampler: penalty for penalty in penalties}
    if not math.isfinite(values.max()):
        # Logits that are NaN or infinite must affect only this sequence, which ends by it: see `rows_without_numbers`.
        return _highest(values, tokens)
    relative = values - values.max()
    for run in _runs(tuple(name for name in parameters.order if name in named or _is_on(name, parameters))):
        for name in run:
            if name in named:
                values = _penalized(values, tokens, named[name], len(logits))
        peak = values.max()
        temperature = temperature_of(values, parameters) if "temperature" in run else 1.0
        if temperature < _GREEDY_TEMPERATURE:
            return _highest(values, tokens)
        own = replace(_only(run, parameters), temperature=temperature)
        if own.filters:
            kept, relative = filtered(values, own, candidate_filter, FAR)
            tokens, values = tokens[kept], values[kept]
        else:
            relative = scale(values, peak, temperature)
        if temperature != 1.0:
            values = values / np.float32(temperature)
    return tokens, relative


def _highest(values: Floats, tokens: NDArray[np.intp]) -> tuple[NDArray[np.intp], Floats]:
    return tokens[[values.argmax()]], np.zeros(1, np.float32)


@lru_cache(maxsize=256)
def _runs(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Split ``names`` into the longest runs in which they have the default order."""
    runs: list[list[str]] = []
    for name in names:
        if runs and DEFAULT_ORDER.index(runs[-1][-1]) < DEFAULT_ORDER.index(name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return tuple(tuple(run) for run in runs)


def _is_on(name: str, parameters: SamplingParams) -> bool:
    return any(getattr(parameters, field) != value for field, value in _OFF.get(name, {}).items())


def _only(names: Sequence[str], parameters: SamplingParams) -> SamplingParams:
    """Return ``parameters`` with no samplers but ``names``."""
    off = {field: value for name, fields in _OFF.items() if name not in names for field, value in fields.items()}
    return replace(parameters, **off)


def _penalized(values: Floats, tokens: NDArray[np.intp], penalty: Penalty, vocabulary_size: int) -> Floats:
    """Return the ``values`` of ``tokens`` behind the penalty."""
    logits = np.full(vocabulary_size, -np.inf, np.float32)
    logits[tokens] = values
    penalty.apply(logits)
    penalized: Floats = logits[tokens]
    return penalized
