"""Importing the package is light: what opens a model is imported when a model is opened, and no web server then."""

import subprocess
import sys

import caravan
import caravan.client

_HEAVY = (
    "aiohttp",
    "caravan_proto",
    "caravan_dialects",
    "caravan_router",
    "caravan_scheduler",
    "caravan_serve",
    "caravan_studio",
    "caravan_shard",
    "google",
    "grpc",
    "httpx2",
    "jinja2",
    "llama_cpp",
    "msgspec",
)
_CLIENT_NEEDS = {"caravan_dialects", "httpx2", "msgspec"}
_USES_A_MODEL = """
from caravan import LLM, SamplingParams
with LLM("toy.gguf", backend="fake") as llm:
    llm.generate("a", SamplingParams(max_tokens=3))
    llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=3))
"""
_SERVES_WITHOUT_AIOHTTP = """
import sys
from caravan import LLM, ServerError
sys.modules["aiohttp"] = None
with LLM("toy.gguf", backend="fake") as llm:
    try:
        llm.serve(port=0)
    except ServerError as error:
        print(error)
"""


def _output_of(program: str) -> str:
    """Return what a program prints, in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def _imported_by(statements: str) -> set[str]:
    """Return the names of the packages that a program imports."""
    program = f"{statements}\nimport sys\nprint(*(name.partition('.')[0] for name in sys.modules))"
    return set(_output_of(program).split())


def test_importing_loads_neither_llama_cpp_nor_a_server() -> None:
    imported = _imported_by("import caravan")
    assert "caravan" in imported
    assert not imported.intersection(_HEAVY)


def test_a_client_needs_neither_a_model_nor_a_web_server() -> None:
    assert _imported_by("from caravan import Client").intersection({*_HEAVY, "numpy"}) == _CLIENT_NEEDS


def test_a_model_needs_no_web_server() -> None:
    assert "aiohttp" not in _imported_by(_USES_A_MODEL)


def test_serving_a_model_without_aiohttp_names_what_is_missing() -> None:
    assert "a server needs packages that are not installed: pip install 'aiohttp>=" in _output_of(
        _SERVES_WITHOUT_AIOHTTP
    )


def test_every_public_name_is_there_and_documented() -> None:
    for package in (caravan, caravan.client):
        for name in package.__all__:
            assert getattr(package, name).__doc__, name
