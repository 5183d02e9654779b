"""Six ways to install the wheel: each program and import then works, or names in one line what it lacks.

Each is an environment without the packages of this one, and programs find no others on their path. Packages are
downloaded, except llama-cpp-python, which is that of `make`.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from deploy.tools import ROOT

from caravan_proto.packages import NEEDS, Part, requirements
from caravan_shard.llama_wheel import built_wheel, pinned_requirement
from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

COMBINATIONS = {
    "nothing": (),
    "client": (Part.CLIENT,),
    "router": (Part.ROUTER,),
    "shard": (Part.SHARD,),
    "library": (Part.LIBRARY,),
    "everything": tuple(Part),
}
LACKS = r".*error: .*needs packages that are not installed: pip install '.*'\n"
USES_A_MODEL = """
try:
    from caravan import LLM, SamplingParams
    with LLM("toy.gguf", backend="fake") as llm:
        print(len(llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids), "tokens")
except Exception as error:
    raise SystemExit(f"error: {error}")
"""
USES_A_SERVER = """
import sys
try:
    from caravan import Client, SamplingParams
    with Client(sys.argv[1]) as client:
        output, = client.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))
        print(len(output.outputs[0].token_ids), "tokens")
except Exception as error:
    raise SystemExit(f"error: {error}")
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with the wheel. ``url``: of a server that is not part of it."""

    folder: Path
    url: str

    def start(self, *command: str) -> "subprocess.Popen[str]":
        program, *words = command
        return subprocess.Popen(
            [self.folder / "bin" / program, *words],
            cwd=self.folder,
            env={"PATH": str(self.folder / "bin"), "HOME": str(self.folder), "CARAVAN_SERVER": self.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def prints(self, *command: str) -> tuple[int, str]:
        """Run a program until it ends; return its status and what it prints."""
        with self.start(*command) as process:
            try:
                printed, _ = process.communicate(timeout=DEADLINE_S)
            finally:
                process.kill()
            return process.returncode, printed

    def serves(self, ready: str, *command: str) -> tuple[int, str]:
        """Run a program until it ends by itself, or prints ``ready`` and is asked to end."""
        printed = ""
        with self.start(*command) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    printed += line
                    if re.search(ready, line):
                        process.send_signal(signal.SIGTERM)
            finally:
                os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            return process.wait(DEADLINE_S), printed


@dataclass(frozen=True, slots=True)
class Use:
    """``run``: uses a part, and returns a status and what was printed. ``shown``: what is printed if it works."""

    part: Part
    run: Callable[[Installed], tuple[int, str]]
    shown: str


def _serve(installed: Installed) -> tuple[int, str]:
    words = ("serve", "toy.gguf", "--backend", "fake", "--port", "0", "--hostname", "127.0.0.1")
    return installed.serves("^  curl", "caravan", *words)


def _router(installed: Installed, *flags: str) -> tuple[int, str]:
    words = ("--port", "0", "--hostname", "127.0.0.1", "--shard", f"unix:{installed.folder}/none.sock", *flags)
    return installed.serves("listening", "caravan-router", *words)


def _router_with_tools(installed: Installed) -> tuple[int, str]:
    config = installed.folder / "mcp.json"
    config.write_text('{"mcpServers": {"files": {"command": "none"}}}')
    return _router(installed, "--mcp-config", str(config))


def _shard(installed: Installed) -> tuple[int, str]:
    words = ("--backend", "fake", "--model", "toy.gguf", "--address", f"unix:{installed.folder}/0.sock")
    return installed.serves(": serving", "caravan-shard", *words)


USES = (
    Use(Part.SERVE, _serve, "Caravan is ready on "),
    Use(Part.ROUTER, _router, "listening"),
    Use(Part.MCP, _router_with_tools, "listening"),
    Use(Part.SHARD, _shard, "toy model ready"),
    Use(Part.CLIENT, lambda it: it.prints("python", "-c", USES_A_SERVER, it.url), "3 tokens"),
    Use(Part.LIBRARY, lambda it: it.prints("python", "-c", USES_A_MODEL), "3 tokens"),
    Use(Part.RUN, lambda it: it.prints("caravan", "run", "toy.gguf", "a", "--set", "max_tokens=3"), ""),
    Use(Part.BENCH, lambda it: it.prints("caravan", "bench", "--url", it.url, "--requests", "2", "--tokens", "3"), ""),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--backend", "fake", models=("toy.gguf",)) as running:
        yield running


@pytest.fixture(scope="module")
def llama() -> Path:
    """The wheel of llama-cpp-python, which is compiled if `make` has not done it."""
    with pytest.MonkeyPatch.context() as patch:
        # Tests have a cache of their own, in which pip would find nothing.
        patch.delenv("XDG_CACHE_HOME")
        return built_wheel(sys.executable, pinned_requirement((ROOT / "pyproject.toml").read_text()), ROOT / ".cache")


def install(folder: Path, wheel: Path, llama: Path, parts: Sequence[Part]) -> None:
    """Make an environment as docs/python.md says: the wheel without dependencies, then what the parts need."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin/python"))
    options = ("--quiet", "--constraint", str(ROOT / "constraints.txt"), "--find-links", str(llama.parent))
    subprocess.run([*pip, "install", "--quiet", "--no-deps", wheel], check=True)
    if parts:
        asked = [str(folder / "bin/python"), "-m", "caravan_proto.packages", *parts]
        needed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
        assert set(needed) == set(requirements(*parts))
        subprocess.run([*pip, "install", *options, "--no-warn-conflicts", *needed], check=True)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_works_or_names_what_is_missing(
    name: str, wheel: Path, llama: Path, served: Served, tmp_path: Path
) -> None:
    parts = COMBINATIONS[name]
    begun = time.monotonic()
    install(tmp_path / "environment", wheel, llama, parts)
    print(f"{name}: installed in {time.monotonic() - begun:.0f} s")
    installed = Installed(tmp_path / "environment", served.url)
    there = {package for part in parts for package in NEEDS[part]}
    assert installed.prints("caravan", "--version")[0] == 0
    for use in USES:
        begun = time.monotonic()
        status, printed = use.run(installed)
        print(f"{name}: {use.part} took {time.monotonic() - begun:.1f} s")
        assert "Traceback" not in printed, printed
        if there.issuperset(NEEDS[use.part]):
            assert (status, use.shown in printed) == (0, True), printed
        else:
            assert status != 0
            assert re.fullmatch(LACKS, printed), printed


def test_the_six_leave_no_part_untried() -> None:
    """Except those that are parts of others, and those that need a server beside them."""
    inner, with_servers = {Part.DIALECTS, Part.ENGINE, Part.MODELS}, {Part.OTLP, Part.POSTGRESQL}
    assert {use.part for use in USES} == {*Part} - inner - with_servers
    assert len(COMBINATIONS) == 6
