"""Shell scripts, YAML files and container files of the repository, checked by linters."""

import subprocess

from deploy.tools import ROOT, run_tool


def tracked_files() -> list[str]:
    """Return the paths of all files that git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def is_shell_script(path: str) -> bool:
    with (ROOT / path).open("rb") as file:
        shebang = file.readline(64)
    return shebang.startswith(b"#!") and (b"bash" in shebang or b"/sh" in shebang)


def test_shell_scripts_pass_shellcheck() -> None:
    scripts = [path for path in tracked_files() if is_shell_script(path)]
    assert ".ci/run" in scripts
    run_tool("shellcheck", *scripts)


def test_container_files_pass_hadolint() -> None:
    container_files = [path for path in tracked_files() if path.endswith("Containerfile")]
    assert container_files
    run_tool("hadolint", *container_files)


def test_the_installed_helm_runs() -> None:
    assert run_tool("helm", "version", "--short").startswith("v4.")
