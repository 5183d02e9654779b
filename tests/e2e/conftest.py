from collections.abc import Iterator

import pytest

from caravan_testing.oracle import Oracle
from caravan_testing.serve_process import Served, serve


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """One server with the demo model, shared by all tests that do not harm it.

    It computes exactly, so that a text does not depend on what else the tests do, or on when they do it. A
    shard that is killed may take its time to come back.
    """
    with serve("-np", "8", "-c", "16384", "-t", "1", "--exact", "--shard-grace-s", "600") as running:
        yield running


@pytest.fixture(scope="session")
def toy() -> Iterator[Served]:
    """One server with the toy model, which computes a token in 0.1 ms, so that what is cached is worth fetching."""
    with serve("--backend", "fake", "--fake-token-ms", "0.1", "-np", "4", "-c", "8192") as running:
        yield running


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """The demo model without a server."""
    result = Oracle()
    yield result
    result.llama.close()
