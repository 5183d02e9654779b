"""A test fails when the router blocks its event loop."""

import pytest

from caravan_router.http.ops.routes import openapi_document
from caravan_router.http.page.files import page
from caravan_testing.event_loop import grpc_stays_up, loop_is_never_blocked

__all__ = ["grpc_stays_up", "loop_is_never_blocked"]


@pytest.fixture(autouse=True, scope="session")
def files_are_read() -> None:
    """Read the files that the program also reads before its event loop runs."""
    openapi_document()
    page()
