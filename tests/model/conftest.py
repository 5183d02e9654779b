"""What holds for all tests with a model in their own process."""

from collections.abc import Iterator

import pytest

from caravan_shard.backends.llama.row_by_row import ROW_BY_ROW


@pytest.fixture(scope="module", autouse=True)
def closed_models() -> Iterator[None]:
    """Check that a file closes its models: beside one that stays open, no test of another file may have --exact."""
    yield
    assert ROW_BY_ROW._open == 0
