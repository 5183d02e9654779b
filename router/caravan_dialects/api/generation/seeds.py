"""Seeds of the counter-based sampling."""

import secrets

from caravan_proto.messages.sampling import MAX_SEED

# As a seed, it asks for a random one in every dialect, as in llama-server.
RANDOM_SEED = -1
# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
_GAMMA = 0x9E3779B97F4A7C15


def draw_seed() -> int:
    """Return a seed for a request without one."""
    return secrets.randbits(64)


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice ``index``: ``seed`` itself for the first, else the ``index``-th output of SplitMix64.

    The first choice thus equals the choice of a request for one, and no two choices share their draws: SplitMix64
    repeats no output within 2**64.
    """
    if index == 0:
        return seed
    mixed = (seed + index * _GAMMA) & MAX_SEED
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return mixed ^ (mixed >> 31)
