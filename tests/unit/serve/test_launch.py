"""What `caravan launch` gives an agent, and what it does without one, or without a context that suffices."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from caravan_models.errors import FetchError
from caravan_serve import launch as launching
from caravan_serve.agents import AGENTS, Launch, Target
from caravan_serve.launch import LEAST_CONTEXT, check_trained_context, divided, environment, main, write_files
from caravan_serve.servers import ServerError

URL, MODEL = "http://127.0.0.1:4000", "owner/model:Q4_K_M"
TARGET = Target(url=URL, model=MODEL, context=70_000, api_key="", folder=Path("/state/launch/x"))


def launch_of(name: str, target: Target = TARGET) -> Launch:
    return AGENTS[name].launch(target)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_the_server_the_model_and_a_key(name: str) -> None:
    for key, expected in (("", "caravan"), ("secret", "secret")):
        launch = launch_of(name, replace(TARGET, api_key=key))
        told = json.dumps([dict(launch.variables), launch.flags, dict(launch.files)])
        assert URL in told
        assert MODEL in told
        assert expected in told


@pytest.mark.parametrize("name", AGENTS)
def test_files_are_in_the_folder_of_the_launch(name: str, tmp_path: Path) -> None:
    launch = launch_of(name, replace(TARGET, folder=tmp_path))
    write_files(tmp_path, launch)
    written = {str(file.relative_to(tmp_path)): file for file in tmp_path.rglob("*") if file.is_file()}
    assert set(written) == set(launch.files)
    for file in written.values():
        assert file.stat().st_mode & 0o077 == 0
        assert isinstance(json.loads(file.read_text()), dict)
    if launch.files:
        assert any(str(tmp_path) in text for text in (*launch.variables.values(), *launch.flags))


def test_codex_gets_settings_in_toml() -> None:
    flags = launch_of("codex").flags
    assert set(flags[::2]) == {"-c"}
    settings = tomllib.loads("\n".join(flags[1::2]))
    assert (settings["model"], settings["model_provider"], settings["model_context_window"]) == (
        MODEL,
        "caravan",
        70_000,
    )
    provider = settings["model_providers"]["caravan"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{URL}/v1", "responses")
    assert launch_of("codex").variables == {provider["env_key"]: "caravan"}


def test_agents_know_the_context() -> None:
    assert launch_of("claude").variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "70000"
    config = json.loads(launch_of("opencode").variables["OPENCODE_CONFIG_CONTENT"])
    assert config["provider"]["caravan"]["models"][MODEL]["limit"]["context"] == 70_000
    providers = json.loads(launch_of("pi").files["models.json"])["providers"]
    assert providers["caravan"]["models"][0]["contextWindow"] == 70_000


def test_variables_that_would_lead_elsewhere_are_not_inherited() -> None:
    found = environment(launch_of("claude"), {"ANTHROPIC_API_KEY": "x", "ANTHROPIC_BASE_URL": "y", "HOME": "/h"})
    assert "ANTHROPIC_API_KEY" not in found
    assert (found["ANTHROPIC_BASE_URL"], found["HOME"]) == (URL, "/h")


@pytest.mark.parametrize(
    ("argv", "own", "of_agent"),
    [
        (["codex"], ["codex"], []),
        (["-m", "x", "codex", "exec", "-m", "y"], ["-m", "x", "codex"], ["exec", "-m", "y"]),
        (["codex", "--", "--help"], ["codex"], ["--help"]),
        (["nothing"], ["nothing"], []),
        (["--help"], ["--help"], []),
    ],
)
def test_what_follows_the_agents_name_is_the_agents(argv: list[str], own: list[str], of_agent: list[str]) -> None:
    assert divided(argv, AGENTS) == (own, of_agent)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_that_is_missing_is_named_with_its_installation(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _program: None)
    assert main([name]) == 1
    agent = AGENTS[name]
    assert capsys.readouterr().err == f"caravan launch: error: {agent.program} is not installed: {agent.install}\n"


def test_a_model_that_was_trained_for_less_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Facts:
        trained_context = 8192

    class Fetched:
        parts = ()

    monkeypatch.setattr(launching, "fetched", lambda _model: Fetched())
    monkeypatch.setattr(launching, "gguf_facts", lambda _parts: Facts())
    with pytest.raises(ServerError, match=r"m was trained for a context of 8,192 tokens, and agents need 65,536"):
        check_trained_context("m")
    Facts.trained_context = LEAST_CONTEXT
    check_trained_context("m")
    check_trained_context("")


def test_a_model_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FetchError, match="there is no such file"):
        check_trained_context("nothing-of-the-kind")
