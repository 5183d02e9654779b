"""A user's terminal, which tmux shows: `caravan run` in a chat and in a pipe, `ps` and `stop`, on real processes."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from caravan_testing.serve_process import Served, serve, write_models
from caravan_testing.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHELL = ("bash", "--norc", "--noprofile")
# The toy model answers with random characters until it may not. In Markdown, those that follow may change how the first
# ones are shown, as a line of hyphens does; words of letters stay.
ENDLESS = "--set ignore_eos=true --set max_tokens=100000"
WORDS = '--set structured_outputs=\'{"regex": "([a-z]{20} )+"}\''


class Tmux:
    """A shell in a terminal of 100 by 50."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._command = ("tmux", "-S", str(folder / "socket"), "-f", "/dev/null")
        shell = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in environment.items()), *SHELL])
        self._run("new-session", "-d", "-x", "100", "-y", "50", "-c", str(folder), shell)

    def _run(self, *words: str) -> str:
        done = subprocess.run((*self._command, *words), capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        return done.stdout

    @property
    def screen(self) -> str:
        """All that was shown, without the empty lines at the end."""
        return self._run("capture-pane", "-p", "-J", "-S", "-").rstrip()

    def enter(self, line: str) -> None:
        """Type a line as soon as it is asked for. It is taken when this returns: what is shown next is its effect."""
        self._wait("a prompt", lambda last: re.search("^(ready)?>$", last))
        self._run("send-keys", "-l", line)
        self._wait(f"the typed {line!r}", lambda last: last.endswith(line))
        self._run("send-keys", "Enter")
        self._wait(f"the end of {line!r}", lambda last: not last.endswith(line))

    def _wait(self, what: str, accept: Callable[[str], object]) -> None:
        """Wait for a last line."""
        wait_until(lambda: self.screen, what, lambda screen: accept(screen.rpartition("\n")[2]))

    def press(self, key: str) -> None:
        self._run("send-keys", key)

    def see(self, pattern: str) -> None:
        wait_until(lambda: self.screen, pattern, lambda screen: re.search(pattern, screen, re.MULTILINE))

    def end(self) -> None:
        self._run("kill-server")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    models = write_models(tmp_path, "first", "second")
    flags = ("--backend", "fake", "--fake-step-ms", "5", "--mmproj", "toy", "--ctx-size", "262144")
    with serve(*flags, "--kv-layout", "unified", "--models-file", str(models), models=()) as running:
        yield running


@pytest.fixture
def tmux(served: Served, tmp_path: Path) -> Iterator[Tmux]:
    assert shutil.which("tmux"), "there is no tmux: apt-get install tmux"
    script = tmp_path / "caravan"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m caravan_serve "$@"\n')
    script.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PS1": "ready> ",
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "CARAVAN_SERVER": served.url,
    }
    terminal = Tmux(tmp_path, environment)
    try:
        yield terminal
    finally:
        terminal.end()


def test_a_day_in_a_terminal(tmux: Tmux, tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "dot.png")
    tmux.enter(f"caravan run first {ENDLESS} {WORDS}")
    tmux.see("/help lists the commands")
    # An answer is shown while it is generated.
    tmux.enter("hello there")
    tmux.see(r"^> hello there\n\S{20}")
    # It may fill the screen by now: its end is shown, as it grows.
    shown = tmux.screen
    wait_until(lambda: tmux.screen, "the answer grows", shown.__ne__)
    tmux.press("C-c")
    tmux.see("^ended$")
    # The answer is there once.
    beginning = re.findall(r"^> hello there\n(\S{20})", tmux.screen, re.MULTILINE)[0]
    assert tmux.screen.count(beginning) == 1
    tmux.enter("/set max_tokens 8")
    tmux.enter("/retry")
    tmux.enter("/fork")
    tmux.see(r"\* 2  2 messages: hello there")
    tmux.enter("/image dot.png")
    tmux.see("dot.png goes with the next message")
    tmux.enter("what is it")
    tmux.enter("/fork 1")
    tmux.see(r"\* 1  2 messages: hello there")
    tmux.see("2  4 messages: ")
    tmux.enter("/save chat.json")
    tmux.see("saved to ")
    tmux.enter("/bye")
    tmux.enter("printf 'a diff' | caravan run first summarise --set max_tokens=8 > answer.txt; echo piped $?")
    tmux.see("^piped 0$")
    assert (tmp_path / "answer.txt").read_text().strip()
    tmux.enter("caravan ps")
    tmux.see(r"^first .* 1 +0$")
    tmux.enter("caravan stop first; echo stopped $?")
    tmux.see("^unloading first\nstopped 0$")
    tmux.enter("caravan stop third; echo failed $?")
    tmux.see(r"has no model third; it has [^\n]*\nfailed 1$")
    # An endless answer in a pipe ends with Ctrl-C, too.
    tmux.enter(f"caravan run second x {ENDLESS} | tee endless.txt")
    wait_until(lambda: (tmp_path / "endless.txt").exists() and (tmp_path / "endless.txt").read_text(), "an answer")
    tmux.press("C-c")
    tmux.enter("echo again")
    tmux.see("^again$")
    assert [kind for kind in ("Traceback", "Error") if kind in tmux.screen] == []
