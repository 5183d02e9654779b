"""A part of Caravan imports no other packages than those that it says it needs, and names those that are missing."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import packages_distributions

import pytest
from doc_tables import ROOT

import caravan_router.__main__
import caravan_serve.commands
from caravan import LLM, ModelError
from caravan_models.errors import needs_packages
from caravan_proto.packages import NEEDS, Part, lack, main, missing, module_of, requirements

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_DEFAULT = _PROJECT["dependencies"]
_USES_A_MODEL = """
from caravan import LLM, SamplingParams
with LLM("toy.gguf", backend="fake") as llm:
    llm.generate("a", SamplingParams(max_tokens=3))
    llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=3))
"""
_CLIENT_WITHOUT_HTTPX2 = """
import sys
sys.modules["httpx2"] = None
try:
    from caravan import Client
except ImportError as error:
    print(error)
"""
_EXECUTOR_WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
try:
    from caravan import Executor
except ImportError as error:
    print(error)
"""
# It sets up its process before it looks.
_SHARD_WITHOUT_NUMPY = """
import sys
from caravan_shard.__main__ import main
sys.modules["numpy"] = None
sys.exit(main())
"""


def _output_of(program: str) -> str:
    """Return what a program prints, in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_the_distribution_requires_what_its_parts_need_and_nothing_else() -> None:
    extras = _PROJECT["optional-dependencies"]
    assert set(requirements(*(part for part in Part if part not in extras))) == set(_DEFAULT)
    assert {name: set(requirements(Part(name))) for name in extras} == {
        name: set(needed) for name, needed in extras.items()
    }


def test_everything_that_is_needed_is_found_where_it_is_installed() -> None:
    assert {part: missing(part) for part in Part} == {part: [] for part in Part}


@pytest.mark.parametrize(
    ("part", "program"),
    [
        (Part.BENCH, "import caravan_serve.bench.cli"),
        (Part.CLIENT, "from caravan import Client"),
        (Part.LIBRARY, _USES_A_MODEL),
    ],
)
def test_a_part_imports_no_more_than_it_needs(part: Part, program: str) -> None:
    loaded = _output_of(f"{program}\nimport sys\nprint(*(name.partition('.')[0] for name in sys.modules))").split()
    by_module = packages_distributions()
    imported = {name.lower().replace("_", "-") for module in loaded for name in by_module.get(module, ())}
    all_names = {name for names in NEEDS.values() for name in names}
    # That a package of others imports it where it is there does not make it needed.
    assert imported & all_names - {"numpy"} <= {*NEEDS[part]}
    assert "msgspec" in imported


@pytest.mark.parametrize(
    ("run", "argv", "absent", "line"),
    [
        (caravan_serve.commands.main, ["caravan", "serve", "m"], "aiohttp", "caravan serve: error: it needs"),
        (caravan_serve.commands.main, ["caravan", "serve", "m"], "llama-cpp-python", "caravan serve: error: it needs"),
        (caravan_serve.commands.main, ["caravan", "bench"], "rich", "caravan bench: error: it needs"),
        (caravan_serve.commands.main, ["caravan", "router"], "grpcio", "caravan-router: error: it needs"),
        (caravan_router.__main__.main, ["caravan-router"], "prometheus-client", "caravan-router: error: it needs"),
    ],
)
def test_a_program_names_the_command_that_installs_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: Callable[[], int],
    argv: list[str],
    absent: str,
    line: str,
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setitem(sys.modules, module_of(absent), None)
    assert run() == 2
    (command,) = (f"pip install '{each}'\n" for each in _DEFAULT if each.startswith((f"{absent}>", f"{absent}=")))
    assert capsys.readouterr() == ("", f"{line} packages that are not installed: {command}")


def test_a_shard_names_the_command_that_installs_what_is_missing() -> None:
    ended = subprocess.run([sys.executable, "-c", _SHARD_WITHOUT_NUMPY], capture_output=True, text=True, check=False)
    line = "caravan-shard: error: it needs packages that are not installed: pip install 'numpy>=2'\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


def test_a_model_names_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpy", "grpcio"):
        monkeypatch.setitem(sys.modules, module_of(name), None)
    with pytest.raises(ModelError, match=r"needs packages .*: pip install 'grpcio>=[0-9.]+' 'numpy>=2'$"):
        LLM("toy.gguf", backend="fake")


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (_CLIENT_WITHOUT_HTTPX2, "caravan.client needs packages that are not installed: pip install 'httpx2>=2.12'\n"),
        (_EXECUTOR_WITHOUT_NUMPY, "caravan.Executor needs packages that are not installed: pip install 'numpy>=2'\n"),
    ],
)
def test_an_import_names_what_is_missing(program: str, line: str) -> None:
    assert _output_of(program) == line


def test_models_by_name_need_a_hub() -> None:
    assert "pip install 'httpx2>=2.12' 'huggingface-hub>=2.4' 'tqdm>=4.66'" in str(
        needs_packages(ModuleNotFoundError("no hub"))
    )


def test_nothing_is_lacking_where_all_is_installed() -> None:
    assert lack(Part.SERVE) == ""


def test_requirements_of_a_part_are_printed_for_pip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["packages", "client"])
    assert main() == 0
    assert capsys.readouterr().out.split() == ["httpx2>=2.12", "msgspec>=0.21"]


@pytest.mark.parametrize("words", [[], ["client", "none"]])
def test_a_part_that_does_not_exist_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["packages", *words])
    assert main() == 2
    assert "{client,dialects," in capsys.readouterr().err
