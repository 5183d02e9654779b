"""`caravan serve` divides the host among its shards."""

import os

import pytest

from caravan_router.serve.cli import host_shares

CORES = len(os.sched_getaffinity(0))
BOTH = ["--threads", str(max(1, CORES // 2)), "--cache-ram", "4096"]


@pytest.mark.parametrize(
    ("shards", "flags", "environment", "shares"),
    [
        (1, [], {}, []),
        (2, ["-m", "x.gguf"], {}, BOTH),
        (2, ["-t", "3"], {}, BOTH[2:]),
        (2, ["--threads=3"], {}, BOTH[2:]),
        (2, [], {"CARAVAN_THREADS": "3"}, BOTH[2:]),
        (2, ["-cram", "100"], {}, BOTH[:2]),
        (2, [], {"CARAVAN_CACHE_RAM": "100"}, BOTH[:2]),
    ],
)
def test_each_shard_gets_its_share_of_what_the_user_has_not_set(
    shards: int, flags: list[str], environment: dict[str, str], shares: list[str]
) -> None:
    assert host_shares(shards, flags, environment) == shares


def test_the_memory_is_the_default_of_a_shard() -> None:
    from caravan_shard.config import ShardConfig

    assert host_shares(1, [], {}) == []
    assert host_shares(2, [], {})[-1] == str(ShardConfig(backend="fake").cache_ram // 2)
