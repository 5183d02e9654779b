"""Logits of every kind that sampling must cope with."""

from collections.abc import Iterator

import numpy as np

from caravan_shard.arrays import Floats


def kinds_of_logits(size: int) -> Iterator[tuple[str, Floats]]:
    """Yield names and logits [size]."""
    random = np.random.default_rng(size)
    normal = random.standard_normal(size).astype(np.float32)
    for scale in (0.1, 1.0, 3.0, 10.0):
        yield f"normal, {scale}", normal * np.float32(scale)
    peaked = normal.copy()
    peaked[-1] = 20.0
    yield "peaked", peaked
    # As a model's: few tokens are likely, and the others have a long tail.
    yield "model", (normal - 3.0 * np.log(random.permutation(size) + 1.0)).astype(np.float32)
    yield "ties", np.round(normal * 3.0).astype(np.float32)
    yield "some ties", (np.round(normal * 300.0) / 100.0).astype(np.float32)
    yield "all equal", np.full(size, 1.5, np.float32)
    masked = normal * np.float32(3.0)
    masked[random.random(size) < 0.9] = -np.inf
    masked[0] = 0.0
    yield "masked", masked
    broken = normal.copy()
    broken[size // 2] = np.nan
    yield "one NaN", broken
    broken = normal.copy()
    broken[-1] = np.nan
    yield "NaN at the end", broken
