"""The scheduler and the dialects can be used in another program, without what a server needs."""

import json
import subprocess
import sys

from caravan_proto.packages import NEEDS, Part, module_of

# Imports every module of a package where these are absent, and prints what was loaded of others.
_IMPORTS_ALL = """
import importlib, json, pkgutil, sys
for name in ("aiohttp", "google", "grpc", "llama_cpp", "numpy", "prometheus_client", "uvloop"):
    sys.modules[name] = None
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    importlib.import_module(module.name)
print(json.dumps(sorted({name.partition(".")[0] for name, module in sys.modules.items() if module is not None})))
"""


def _loaded_by(package: str) -> set[str]:
    ended = subprocess.run([sys.executable, "-c", _IMPORTS_ALL, package], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout))


def test_the_scheduler_needs_nothing_but_the_messages() -> None:
    loaded = _loaded_by("caravan_scheduler")
    assert {name for name in loaded if name.startswith("caravan")} == {"caravan_scheduler", "caravan_proto"}
    assert not loaded - {*sys.stdlib_module_names, "caravan_scheduler", "caravan_proto"} - _of_the_interpreter()


def test_the_dialects_need_what_their_part_installs() -> None:
    loaded = _loaded_by("caravan_dialects")
    ours = {"caravan_dialects", "caravan_proto", "caravan_scheduler"}
    assert {name for name in loaded if name.startswith("caravan")} == ours
    assert {module_of(name) for name in NEEDS[Part.DIALECTS]} <= loaded
    assert not [name for name in NEEDS[Part.DIALECTS] if "grpc" in name or "aiohttp" in name]


def _of_the_interpreter() -> set[str]:
    """What an interpreter of this environment loads by itself."""
    ended = subprocess.run(
        [sys.executable, "-c", "import sys; print(*(name.partition('.')[0] for name in sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ended.stdout.split())
