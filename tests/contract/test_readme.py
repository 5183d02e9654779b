"""What the README says of the program is what the program says of itself."""

from pathlib import Path

from caravan_router.core.errors import EngineError
from caravan_router.http.routes import ROUTES
from caravan_router.http.server.error_table import markdown_table as error_table
from caravan_router.http.server.errors import TABLE, RequestError
from caravan_router.metrics.table import markdown_table

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_metrics_table_is_current() -> None:
    assert markdown_table().strip() in README


def test_every_route_is_named() -> None:
    missing = [route.path for route in ROUTES if f"{route.path}`" not in README]
    assert not missing


def test_the_errors_table_is_current() -> None:
    assert error_table() in README


def test_every_error_that_clients_see_is_in_the_table() -> None:
    def leaves(kind: type[Exception]) -> list[type[Exception]]:
        return [leaf for child in kind.__subclasses__() for leaf in leaves(child)] or [kind]

    for base in (RequestError, EngineError):
        missing = [kind.__name__ for kind in leaves(base) if not any(parent in TABLE for parent in kind.__mro__)]
        assert not missing
