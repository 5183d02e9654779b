"""What the README says of the program is what the program says of itself."""

from pathlib import Path

from caravan_router.http.routes import ROUTES
from caravan_router.metric_table import markdown_table

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_metrics_table_is_current() -> None:
    assert markdown_table().strip() in README


def test_every_route_is_named() -> None:
    missing = [route.path for route in ROUTES if f"{route.path}`" not in README]
    assert not missing
