"""The table of commands, what `caravan` prints of itself, and the completion of shells."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from caravan_proto import __version__
from caravan_proto.command_line import Parser
from caravan_serve.commands import COMMANDS, function_of, main
from caravan_serve.serve_flags import serve_parser
from caravan_testing.programs import status_of


def printed(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["caravan", *words])
    assert status_of(main) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_function_and_a_parser(name: str) -> None:
    command = COMMANDS[name]
    assert callable(function_of(command.run))
    parser = function_of(command.parser)()
    assert isinstance(parser, Parser)
    assert parser.prog in {f"caravan {name}", f"caravan-{name}"}


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(words, capsys, monkeypatch).splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == list(COMMANDS)


@pytest.mark.parametrize("words", [["--version"], ["-V"]])
def test_the_version_is_the_packages(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed(words, capsys, monkeypatch) == f"caravan {__version__}\n"


def test_help_of_a_command_is_its_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(["help", "pull"], capsys, monkeypatch) == printed(["pull", "--help"], capsys, monkeypatch)


def test_a_command_names_the_packages_that_it_lacks() -> None:
    program = """
import sys
from caravan_serve.commands import main
sys.modules["prompt_toolkit"] = None
sys.argv = ["caravan", "run", "x"]
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("caravan run: error: it needs packages that are not installed: pip install 'prompt-")
    assert ended.stderr.count("\n") == 1


def test_help_of_serve_begins_with_examples_and_the_flags_that_matter() -> None:
    text = serve_parser().format_help()
    first, *others = text.partition("the flags that matter first:")[2].split("\n\n")
    names = [line.split()[0].rstrip(",") for line in first.splitlines() if line.startswith("  -")]
    assert names == [
        *("-m", "--port", "--hostname", "--ctx-size", "--parallel", "--gpu-layers"),
        *("--shards", "--models-dir", "--models-hub", "--api-key", "--log-level", "--config", "-h"),
    ]
    assert len(others) > 10
    assert "caravan serve smollm2 " in text.partition("the flags that matter first:")[0]
    flags = serve_parser().flags
    assert len(flags) == len(set(flags))


def test_scripts_of_shells_complete_commands_flags_and_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shell in ("bash", "zsh", "fish"):
        script = printed(["completion", shell], capsys, monkeypatch)
        for word in ("launch", "ctx-size", "smollm2", "gemini"):
            assert word in script, shell


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("caravan ser", ["serve"]),
        ("caravan serve --ctx", ["--ctx-size"]),
        ("caravan run smollm2:1", ["135m", "1.7b"]),
        ("caravan completion fi", ["fish"]),
        ("caravan launch --model x ge", ["gemini"]),
    ],
)
def test_bash_completes(
    line: str,
    completed: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    script = tmp_path / "completion"
    script.write_text(printed(["completion", "bash"], capsys, monkeypatch))
    words = line.split()
    setting = f"COMP_LINE='{line}'; COMP_POINT={len(line)}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    program = f"source {script}; COMP_WORDBREAKS=' :'; {setting}; _caravan; echo \"${{COMPREPLY[@]}}\""
    found = subprocess.run([bash, "-c", program], capture_output=True, text=True, check=True)
    assert sorted(found.stdout.split()) == sorted(completed)
