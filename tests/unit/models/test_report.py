"""What people see of a download: one bar on a terminal, lines elsewhere."""

import io
import logging
import sys
from types import SimpleNamespace

import pytest

from caravan_models.bars import shows_bars
from caravan_models.progress import FetchStage, Meter, Progress, log_line, shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def download(meter: Meter) -> None:
    """Two files, the first of which begins again."""
    for done in (100, 250, 0, 300, 500):
        meter.tell(FetchStage.DOWNLOADING, "a", "0a", done, 500)
    meter.tell(FetchStage.CHECKING, "a", "0a", 500, 500)
    meter.end_file(500)
    meter.tell(FetchStage.WAITING, "b", "0b", 100, 500)
    meter.tell(FetchStage.WAITING, "b", "0b", 500, 500)
    meter.end_file(500)


def test_a_meter_never_goes_backwards() -> None:
    told: list[Progress] = []
    download(Meter(1000, told.append))
    assert [one.done for one in told] == [100, 250, 250, 300, 500, 500, 600, 1000]
    assert [one.file_done for one in told] == [100, 250, 250, 300, 500, 500, 100, 500]


def test_a_log_has_a_line_for_each_tenth() -> None:
    lines: list[str] = []
    with shown("small", lines.append, io.StringIO()) as show:
        download(Meter(1000, show))
    assert lines == [
        "downloading small: 10 % of 1.0 kB",
        "downloading small: 25 % of 1.0 kB",
        "downloading small: 30 % of 1.0 kB",
        "downloading small: 50 % of 1.0 kB",
        "checking small: 50 % of 1.0 kB",
        "waiting for another process that downloads small: 60 % of 1.0 kB",
        "waiting for another process that downloads small: 100 % of 1.0 kB",
    ]


def test_a_terminal_has_one_bar_that_ends_whole() -> None:
    terminal, lines = Terminal(), list[str]()
    with shown("small", lines.append, terminal) as show:
        download(Meter(1000, show))
    assert lines == []
    bars = terminal.getvalue().split("\r")
    assert "100%" in bars[-1]
    assert terminal.getvalue().count("\n") == 1


def test_what_is_there_shows_nothing() -> None:
    terminal = Terminal()
    with shown("small", terminal=terminal):
        pass
    assert terminal.getvalue() == ""


def test_a_program_without_logging_says_it_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("caravan_models.progress")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "propagate", False)
        log_line("downloading small: 10 % of 1.0 kB")
    assert capsys.readouterr().err == "downloading small: 10 % of 1.0 kB\n"


def test_a_notebook_has_bars_though_standard_error_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not shows_bars(io.StringIO())
    for shell, expected in ((None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=object()), True)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert shows_bars(io.StringIO()) is expected
