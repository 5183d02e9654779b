"""The dynamic temperature: low where few of the candidates are likely, high where all are."""

import math

import numpy as np

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats


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
