import os
import subprocess
import sys
from pathlib import Path

import pytest

from caravan_router.auth.key import digest_of
from caravan_router.auth.key_file import parse_keys
from caravan_router.auth.new_key import main


def test_the_entry_is_that_of_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alice"]) == 0
    out, err = capsys.readouterr()
    secret = err.strip().rpartition(" ")[2]
    [key] = parse_keys(out)
    assert (key.tenant.name, key.digest) == ("alice", digest_of(secret))
    assert len(secret) >= 43
    assert secret not in out


def test_every_key_is_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a"]) == main(["b"]) == 0
    first, second = parse_keys(capsys.readouterr().out)
    assert first.digest != second.digest


@pytest.mark.parametrize("name", ["", "a b", 'a"'])
def test_a_name_that_the_file_would_refuse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name])
    assert stop.value.code == 2
    assert "NAME must have 1 to 64" in capsys.readouterr().err


def test_a_router_does_not_start_with_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[[keys]]\nname = 'a'\n")
    command = [sys.executable, "-m", "caravan_router", "router", "--shard", "127.0.0.1:1", "--port", "0"]
    done = subprocess.run(
        [*command, "--api-keys-file", path], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 2
    assert f"error: --api-keys-file: {path}: Object missing required field `sha256`" in done.stderr
