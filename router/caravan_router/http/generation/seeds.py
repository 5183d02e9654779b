"""Where randomness comes from."""

import secrets

MAX_SEED = 2**64 - 1

# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
_GAMMA = 0x9E3779B97F4A7C15


def draw_seed() -> int:
    """Of a request that brought none."""
    return secrets.randbits(64)


def choice_seed(seed: int, index: int) -> int:
    """Of the choice ``index``: ``seed`` itself for the first, for others the ``index``-th output of SplitMix64.

    So the first of several choices is what a request for one choice gives, and no two of them share their draws: the
    outputs of one seed differ from one another for the first 2**64.
    """
    if index == 0:
        return seed
    mixed = (seed + index * _GAMMA) & MAX_SEED
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return mixed ^ (mixed >> 31)
