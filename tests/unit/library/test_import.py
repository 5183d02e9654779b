"""Importing the package is light: what opens a model is imported when a model is opened."""

import subprocess
import sys

import caravan
import caravan.client

_HEAVY = (
    "aiohttp",
    "caravan_proto",
    "caravan_router",
    "caravan_shard",
    "google",
    "grpc",
    "httpx2",
    "jinja2",
    "llama_cpp",
    "msgspec",
)
_CLIENT_NEEDS = {"caravan_router", "httpx2", "msgspec"}


def _imported_by(statement: str) -> set[str]:
    """Return the names of the packages that a statement imports, in a process of its own."""
    program = f"import sys; {statement}; print(*(name.partition('.')[0] for name in sys.modules))"
    listing = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(listing.stdout.split())


def test_importing_loads_neither_llama_cpp_nor_a_server() -> None:
    imported = _imported_by("import caravan")
    assert "caravan" in imported
    assert not imported.intersection(_HEAVY)


def test_a_client_needs_no_more_than_its_extra_installs() -> None:
    assert _imported_by("from caravan import Client").intersection({*_HEAVY, "numpy"}) == _CLIENT_NEEDS


def test_every_public_name_is_there_and_documented() -> None:
    for package in (caravan, caravan.client):
        for name in package.__all__:
            assert getattr(package, name).__doc__, name
