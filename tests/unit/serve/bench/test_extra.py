"""The load generator has an extra of its own: a router is installed without what only it needs."""

import subprocess
import sys
import tomllib
from pathlib import Path

_EXTRAS = tomllib.loads((Path(__file__).resolve().parents[4] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
_WITHOUT_RICH = """
import sys
from caravan_serve.commands import main
sys.modules["rich"] = None
sys.argv = ["caravan", "bench", "--help"]
sys.exit(main())
"""
_IMPORTS = """
import sys
import caravan_serve.bench.cli
print(*(name.partition(".")[0] for name in sys.modules))
"""


def _run(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def _names(extra: str) -> set[str]:
    return {requirement.partition(">")[0] for requirement in _EXTRAS[extra]}


def test_the_extra_installs_what_the_load_generator_imports() -> None:
    imported = set(_run(_IMPORTS).stdout.split())
    others = {name for extra in _EXTRAS for name in _names(extra)} - _names("bench")
    assert _names("bench") <= imported
    assert not others & imported


def test_a_router_is_installed_without_it() -> None:
    assert "rich" not in _names("router") | _names("engine")


def test_without_the_extra_the_command_names_it() -> None:
    ended = _run(_WITHOUT_RICH)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "pip install 'llama-caravan[bench]'" in ended.stderr
