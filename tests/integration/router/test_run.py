"""`caravan run` in a terminal and in pipes, `ps`, `stop` and `launch`, over the toy model."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from caravan_serve.agents import AGENTS
from caravan_testing.serve_process import Served, serve, write_models
from caravan_testing.waiting import DEADLINE_S, wait_until

CARAVAN = (sys.executable, "-m", "caravan_serve")
# The toy model's output never ends by itself before this many tokens with its end token ignored.
ENDLESS = ("--set", "ignore_eos=true", "--set", "max_tokens=100000")
SHORT = ("--set", "ignore_eos=true", "--set", "max_tokens=6", "--set", "temperature=0")
# How prompt_toolkit switches to pasting as a whole, once it reads keys.
_ASKING = b"\x1b[?2004h"
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]|\r")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--backend", "fake", "--ctx-size", "262144", "--parallel", "2", "--kv-layout", "unified")
    with serve(*flags, "--fake-step-ms", "5", "--mmproj", "toy", models=("toy.gguf",)) as running:
        yield running


@pytest.fixture
def environment(served: Served, tmp_path: Path) -> dict[str, str]:
    """The server, and folders that are not the user's."""
    own = {"CARAVAN_SERVER": served.url, "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    return {**os.environ, **own, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}


def run(*words: str, env: dict[str, str], given: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a command in a pipe."""
    return subprocess.run((*CARAVAN, *words), input=given, capture_output=True, text=True, env=env, timeout=DEADLINE_S)


class Terminal:
    """A program on a terminal, and all that it has written there."""

    def __init__(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        self._descriptor = descriptor
        self.process = process
        self._data = b""
        self._read_to = 0
        self._prompts = 0

    @property
    def text(self) -> str:
        """Without colours and movements."""
        return _CONTROLS.sub("", self._data.decode(errors="replace"))

    def see(self, pattern: str) -> None:
        """Wait until ``pattern`` occurs after what was seen last."""
        while (found := re.compile(pattern).search(self.text, self._read_to)) is None:
            assert self._more(), f"{pattern!r} is not in {self.text[self._read_to :]!r}"
        self._read_to = found.end()

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def enter(self, line: str) -> None:
        """Wait until the program asks for a line, and type one."""
        self.prompt()
        self.type(line + "\r")

    def prompt(self) -> None:
        """Wait until the program asks for the next line."""
        self._prompts += 1
        while self._data.count(_ASKING) < self._prompts:
            assert self._more(), f"no prompt after {self.text[self._read_to :]!r}"

    def end(self) -> int:
        """Read on until the program has ended, and return its status."""
        while self._more():
            pass
        return self.process.wait(DEADLINE_S)

    def _more(self) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], DEADLINE_S)
        if not ready:
            return False
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:  # all programs have closed the terminal
            return False
        # The program asks where the cursor is.
        if b"\x1b[6n" in data:
            os.write(self._descriptor, b"\x1b[1;1R")
        self._data += data
        return bool(data)


@contextlib.contextmanager
def terminal(*words: str, env: dict[str, str]) -> Iterator[Terminal]:
    """Run a command on a terminal of its own; kill it at the end if it still runs."""
    here, there = pty.openpty()
    try:
        process = subprocess.Popen(
            (*CARAVAN, *words), stdin=there, stdout=there, stderr=there, env=env, start_new_session=True
        )
        os.close(there)
        try:
            yield Terminal(here, process)
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(here)


def test_a_pipe_gets_the_plain_answer_and_appends_what_it_brings(environment: dict[str, str], served: Served) -> None:
    answered = run("run", "toy.gguf", "summarise", *SHORT, env=environment, given="a diff\n")
    assert (answered.returncode, answered.stderr) == (0, "")
    assert "\x1b" not in answered.stdout
    whole = run("run", "toy.gguf", *SHORT, env=environment, given="summarise\n\na diff")
    assert whole.stdout == answered.stdout
    other = run("run", "toy.gguf", "summarise", *SHORT, env=environment, given="another diff\n")
    assert other.stdout != answered.stdout


def test_a_name_that_the_server_has_not_is_an_error_if_the_server_was_named(environment: dict[str, str]) -> None:
    failed = run("run", "nothing.gguf", "x", env=environment)
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "has no model nothing.gguf; it has toy.gguf" in failed.stderr


def test_an_error_of_the_server_is_one_line(environment: dict[str, str]) -> None:
    failed = run("run", "toy.gguf", "x", "--set", "temperature=-1", env=environment)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("caravan run: error: ")
    assert failed.stderr.count("\n") == 1


def test_without_a_server_one_is_started_that_ends_with_the_answer(environment: dict[str, str]) -> None:
    # A port that nothing listens on is the default one of this test's user.
    environment = {**environment, "CARAVAN_BACKEND": "fake"}
    del environment["CARAVAN_SERVER"]
    answered = run("run", "own-toy", "x", *SHORT, env=environment)
    assert (answered.returncode, answered.stderr) == (0, "")
    assert answered.stdout.strip()


def test_a_server_that_cannot_start_says_why(environment: dict[str, str], tmp_path: Path) -> None:
    del environment["CARAVAN_SERVER"]
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"no model")
    failed = run("run", str(file), "x", env=environment)
    assert failed.returncode == 1
    assert "the server could not start: " in failed.stderr
    assert "is no GGUF file" in failed.stderr


def test_a_chat_in_a_terminal(environment: dict[str, str], tmp_path: Path) -> None:
    with terminal("run", "toy.gguf", *SHORT, env=environment) as chat:
        chat.see("toy.gguf; /help lists the commands")
        chat.enter("/help")
        chat.see(r"/system \[TEXT\] +set the system message")
        chat.enter("hello there")
        chat.enter("/retry")
        chat.enter("/fork")
        chat.see("  1  2 messages: hello there")
        chat.see(r"\* 2  2 messages: hello there")
        chat.prompt()
        # Alt and Enter begin another line of the message.
        chat.type("second\x1b\rline\r")
        chat.enter("/fork 1")
        chat.see(r"\* 1  2 messages: hello there")
        chat.see("  2  4 messages: second")
        chat.enter("/fork 2")
        chat.see(r"\* 2  4 messages")
        chat.enter(f"/save {tmp_path / 'chat.json'}")
        chat.see("saved to ")
        chat.enter("/retyr")
        chat.see("did you mean /retry")
        chat.enter("/bye")
        assert chat.end() == 0
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant", "user", "assistant"]
    assert saved["messages"][2]["content"] == "second\nline"
    assert "hello there" in (tmp_path / "state/caravan/run-history").read_text()


def test_an_image_goes_with_a_message(environment: dict[str, str], tmp_path: Path) -> None:
    image = tmp_path / "dot.png"
    Image.new("RGB", (32, 32), "red").save(image)
    with terminal("run", "toy.gguf", *SHORT, env=environment) as chat:
        chat.enter(f"/image {tmp_path / 'nothing.png'}")
        chat.see("there is no file ")
        chat.enter(f"/image {image}")
        chat.see("dot.png goes with the next message")
        chat.enter("what is it")
        chat.enter(f"/save {tmp_path / 'chat.json'}")
        chat.see("saved to ")
        chat.enter("/bye")
        assert chat.end() == 0
    asked, answered = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [part["type"] for part in asked["content"]] == ["image_url", "text"]
    assert answered["role"] == "assistant"
    assert answered["content"]
    shown = run("run", "toy.gguf", "what is it", "--image", str(image), *SHORT, env=environment)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.strip()


def test_a_saved_chat_goes_on(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    with terminal("run", "toy.gguf", "--load", str(file), *SHORT, env=environment) as chat:
        chat.enter("and then")
        chat.enter("/fork")
        chat.see("4 messages: and then")
        chat.prompt()
        chat.type("\x04")
        assert chat.end() == 0


def test_ctrl_c_ends_an_answer_and_keeps_it_and_the_chat(
    environment: dict[str, str], served: Served, tmp_path: Path
) -> None:
    def running() -> int:
        with urllib.request.urlopen(f"{served.url}/admin/shards", timeout=DEADLINE_S) as reply:
            return sum(shard["sequences"] for shard in json.load(reply)["shards"])

    with terminal("run", "toy.gguf", *ENDLESS, env=environment) as chat:
        chat.enter("hello")
        wait_until(running, "the answer has begun")
        chat.process.send_signal(signal.SIGINT)
        chat.see("ended")
        wait_until(running, "the server has ended the generation", lambda count: count == 0)
        chat.prompt()
        chat.type("half a word\x03")
        chat.see("/bye or Ctrl-D ends")
        chat.enter(f"/save {tmp_path / 'chat.json'}")
        chat.see("saved to ")
        chat.prompt()
        chat.type("\x04")
        assert chat.end() == 0
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]


def test_serve_without_a_model_says_what_to_name(environment: dict[str, str]) -> None:
    failed = run("serve", "--port", "0", env=environment)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("caravan serve: error: name a model, such as caravan serve smollm2")
    assert failed.stderr.count("\n") == 1


def test_ps_lists_what_is_loaded(environment: dict[str, str]) -> None:
    listed = run("ps", env=environment)
    assert (listed.returncode, listed.stderr) == (0, "")
    head, row = listed.stdout.splitlines()
    assert head.split() == ["NAME", "SIZE", "CONTEXT", "SHARDS", "RUNNING"]
    assert row.split()[0] == "toy.gguf"
    assert row.split()[-2:] == ["1", "0"]


def test_ps_and_stop_without_a_server_are_one_line(environment: dict[str, str]) -> None:
    for words in (("ps",), ("stop", "toy")):
        failed = run(*words, "--server", "http://127.0.0.1:1", env=environment)
        assert (failed.returncode, failed.stdout) == (1, "")
        assert failed.stderr.startswith(f"caravan {words[0]}: error: no server answers at http://127.0.0.1:1")
        assert failed.stderr.count("\n") == 1


def test_stop_says_what_a_server_without_a_catalogue_cannot_do(environment: dict[str, str]) -> None:
    failed = run("stop", "toy.gguf", env=environment)
    assert failed.returncode == 1
    assert "loaded at its start" in failed.stderr
    unknown = run("stop", "nothing", env=environment)
    assert "has no model nothing; it has toy.gguf" in unknown.stderr


def test_run_loads_a_model_on_demand_and_stop_unloads_it(environment: dict[str, str], tmp_path: Path) -> None:
    models = write_models(tmp_path, "first", "second")
    with serve("--backend", "fake", "--models-file", str(models), models=()) as server:
        environment = {**environment, "CARAVAN_SERVER": server.url}
        assert "no model is loaded" in run("ps", env=environment).stderr
        assert run("run", "second", "x", *SHORT, env=environment).stdout.strip()
        assert run("ps", env=environment).stdout.splitlines()[1].split()[0] == "second"
        assert run("stop", "second", env=environment).stdout == "unloading second\n"


# An agent that prints what it was given.
STAND_IN = f"""#!{sys.executable}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}))
sys.exit(7)
"""


@pytest.fixture
def agents(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment with a program for each agent on its path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        file = folder / agent.program
        file.write_text(STAND_IN)
        file.chmod(0o755)
    return {**environment, "PATH": f"{folder}:{environment['PATH']}"}


@pytest.mark.parametrize("name", AGENTS)
def test_launch_gives_an_agent_the_running_server_and_becomes_it(
    name: str, agents: dict[str, str], served: Served, tmp_path: Path
) -> None:
    (tmp_path / ".kept").write_text("the user's")
    launched = run("launch", name, "do", "--this", env=agents)
    assert (launched.returncode, launched.stderr) == (7, "")
    given: dict[str, Any] = json.loads(launched.stdout)
    assert given["argv"][-2:] == ["do", "--this"]
    files = [file for file in (tmp_path / "state").rglob("*") if file.is_file()]
    told = json.dumps(given) + "".join(file.read_text() for file in files)
    assert served.url in told
    assert "toy.gguf" in told
    # Nothing is written beside its own folder.
    assert {path.name for path in tmp_path.iterdir()} == {".kept", "bin", *(["state"] if files else [])}


def test_launch_starts_a_server_that_ends_with_the_agent(agents: dict[str, str]) -> None:
    agents = {**agents, "CARAVAN_BACKEND": "fake"}
    del agents["CARAVAN_SERVER"]
    launched = run("launch", "-m", "own-toy", "claude", "-p", "x", env=agents)
    assert launched.returncode == 7, launched.stderr
    url = json.loads(launched.stdout)["env"]["ANTHROPIC_BASE_URL"]
    assert "no server answers" in run("ps", "--server", url, env=agents).stderr


def test_launch_says_what_context_a_server_lacks(agents: dict[str, str]) -> None:
    agents = {**agents, "CARAVAN_BACKEND": "fake"}
    del agents["CARAVAN_SERVER"]
    failed = run("launch", "-m", "own-toy", "-c", "4096", "codex", env=agents)
    assert failed.returncode == 1
    assert "and agents need 65,536" in failed.stderr
    assert failed.stderr.count("\n") == 1
