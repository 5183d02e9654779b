"""Flags of `caravan serve` from a file: what overrides what, and what is said of a wrong file."""

from pathlib import Path
from typing import Any

import pytest

from caravan_proto.config_file import read_config_file
from caravan_proto.flags import load, resolve
from caravan_router.config import RouterConfig
from caravan_serve.serve_flags import ServeConfig, serve_parser
from caravan_serve.shard_flags import shard_values

TOML = """
model = "smollm2"
port = 8080
hostname = "0.0.0.0"
ctx-size = 65536
embeddings = true
temp = 0.6
alias = ["a", "b"]
cors_allow_origin = ["https://a.example", "https://b,c.example"]
shards = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "caravan.toml"
    path.write_text(TOML)
    return path


def parsed(words: list[str], environ: dict[str, str]) -> tuple[ServeConfig, RouterConfig, list[str], dict[str, Any]]:
    parser = serve_parser()
    namespace = parser.parse_models(words)
    found = read_config_file(parser, namespace, environ)
    models, given = shard_values(parser, namespace, environ, found)
    serve = resolve(parser, ServeConfig, namespace, environ, found)
    return serve, resolve(parser, RouterConfig, namespace, environ, found), models, given


def test_each_program_gets_its_own_flags(file: Path) -> None:
    serve, router, models, given = parsed(["--config", str(file)], {})
    assert (serve.shards, router.port, router.hostname, models) == (2, 8080, "0.0.0.0", ["smollm2"])
    assert router.cors_allow_origin == ("https://a.example", "https://b,c.example")
    assert given == {"ctx_size": 65536, "embeddings": True, "temp": 0.6, "alias": "a,b"}


def test_the_command_line_overrides_the_environment_and_that_the_file(file: Path) -> None:
    environ = {"CARAVAN_CONFIG": str(file), "CARAVAN_PORT": "9000", "CARAVAN_TEMP": "0.1"}
    _, router, models, given = parsed(["m.gguf", "--temp", "0.2", "-a", "x", "--alias", "y,z"], environ)
    assert (router.port, router.hostname, models) == (9000, "0.0.0.0", ["m.gguf"])
    assert (given["temp"], given["alias"], given["ctx_size"]) == (0.2, "x,y,z", 65536)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prot = 1", "unknown key prot; did you mean port?"),
        ("xyz = 1", "unknown key xyz; caravan serve --help lists all"),
        ("no-page = true", "unknown key no-page; did you mean page?"),
        ("config = 'x'", "unknown key config"),
        ("port: 8080", "must be TOML, such as port = 8080"),
        ("port = 'http'", "port: must be a whole number. Given: 'http'"),
        ("port = 70000", "port: must be >= 0 and <= 65535. Given: 70000"),
        ("port = [1, 2]", "port has one value. Given: 2"),
        ("[port]\na = 1", "port must be a text, a number, true, false or a list of these"),
        ("host = 'a'\nhostname = 'b'", "hostname is there twice"),
    ],
)
def test_a_wrong_file_is_answered_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        parsed(["m.gguf", "--config", str(file)], {})
    written = capsys.readouterr().err
    assert problem in written
    assert str(file) in written
    assert written.count("\n") == 1


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(RouterConfig, prog="x", description="", argv=["--api-key", "s3cret", "--print-config"])
    assert "s3cret" not in capsys.readouterr().out
    assert "s3cret" not in repr(RouterConfig(api_key="s3cret", metrics_key="s3cret"))
