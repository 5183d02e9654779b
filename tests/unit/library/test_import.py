"""Importing the package is light: what opens a model is imported when a model is opened, and no web server then."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

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
_PROJECT = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
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


def _installed_by(*extras: str) -> set[str]:
    """Return the names of the distributions that these extras install, without what those need in turn."""
    found = set[str]()
    for extra in extras:
        for requirement in _PROJECT["optional-dependencies"][extra]:
            parts = re.match(r"([\w.-]+)(?:\[(.*)\])?", requirement)
            assert parts is not None
            name, of_ours = parts.groups()
            found |= _installed_by(*of_ours.split(",")) if of_ours else {name}
    return found


def test_importing_loads_neither_llama_cpp_nor_a_server() -> None:
    imported = _imported_by("import caravan")
    assert "caravan" in imported
    assert not imported.intersection(_HEAVY)


def test_a_client_needs_no_more_than_its_extra_installs() -> None:
    assert _imported_by("from caravan import Client").intersection({*_HEAVY, "numpy"}) == _CLIENT_NEEDS


def test_the_library_installs_all_that_a_model_needs_and_no_web_server() -> None:
    installed, by_module = _installed_by("library"), packages_distributions()
    imported = {name for module in _imported_by(_USES_A_MODEL) for name in by_module.get(module, ())}
    assert imported & _installed_by(*_PROJECT["optional-dependencies"]) <= installed
    assert {"msgspec", "numpy"} <= imported
    assert "aiohttp" not in installed | imported
    assert "aiohttp" in _installed_by("router")


def test_serving_a_model_without_aiohttp_names_the_extra_that_has_it() -> None:
    assert "pip install 'llama-caravan[router]'" in _output_of(_SERVES_WITHOUT_AIOHTTP)


def test_every_public_name_is_there_and_documented() -> None:
    for package in (caravan, caravan.client):
        for name in package.__all__:
            assert getattr(package, name).__doc__, name
