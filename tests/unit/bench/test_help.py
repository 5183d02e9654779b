"""``make bench ARGS=--help`` tells every flag."""

import pytest
from bench import __main__ as bench


def test_the_help_names_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--help"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 0
    assert "--against REVISION" in capsys.readouterr().out
