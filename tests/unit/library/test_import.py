"""Importing the package is light: what opens a model is imported when a model is opened."""

import subprocess
import sys

import caravan

_HEAVY = (
    "aiohttp",
    "caravan_proto",
    "caravan_router",
    "caravan_shard",
    "google",
    "grpc",
    "jinja2",
    "llama_cpp",
    "msgspec",
)
_LISTING = "import sys, caravan; print(*(name.partition('.')[0] for name in sys.modules))"


def test_importing_loads_neither_llama_cpp_nor_a_server() -> None:
    listing = subprocess.run([sys.executable, "-c", _LISTING], capture_output=True, text=True, check=True)
    assert "caravan" in listing.stdout.split()
    assert not set(listing.stdout.split()).intersection(_HEAVY)


def test_every_public_name_is_there_and_documented() -> None:
    for name in caravan.__all__:
        assert getattr(caravan, name).__doc__, name
