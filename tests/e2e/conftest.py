from collections.abc import Iterator

import pytest

from caravan_testing.oracle import Oracle
from caravan_testing.serve_process import Served, serve


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """One server with the demo model, shared by all tests that do not harm it.

    Its attention is not left to what is faster on this machine, because the texts of near ties depend on it.
    """
    with serve("-np", "8", "-c", "16384", "-t", "1", "--kv-layout", "split", "-fa", "off") as running:
        yield running


@pytest.fixture(scope="session")
def toy() -> Iterator[Served]:
    """One server with the toy model, which takes no time."""
    with serve("--backend", "fake", "-np", "4", "-c", "8192") as running:
        yield running


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """The demo model without a server."""
    result = Oracle()
    yield result
    result.llama.close()
