"""What a start found out about equal logits is known to the next one, and never taken from a file of other inputs."""

from pathlib import Path

import pytest

from caravan_shard.backends.llama.numerics import Equality, known_equality

FIRST, SECOND = "a" * 64, "a" * 32 + "b" * 32
FOUND = Equality(company=True, chunk=None, logits="12ab")


class Measure:
    """Counts how often it is called."""

    def __init__(self, result: Equality = FOUND) -> None:
        self.calls = 0
        self._result = result

    def __call__(self) -> Equality:
        self.calls += 1
        return self._result


def test_the_second_start_measures_nothing(tmp_path: Path) -> None:
    first, second = Measure(), Measure(Equality(company=False, chunk=False, logits=""))
    folder = str(tmp_path / "made")
    assert known_equality(folder, FIRST, first) == FOUND
    assert known_equality(folder, FIRST, second) == FOUND
    assert (first.calls, second.calls) == (1, 0)
    assert [path.suffix for path in (tmp_path / "made").iterdir()] == [".json"]


def test_other_inputs_are_measured_even_if_their_file_has_the_same_name(tmp_path: Path) -> None:
    other = Measure(Equality(company=False, chunk=False, logits="cd"))
    known_equality(str(tmp_path), FIRST, Measure())
    assert known_equality(str(tmp_path), SECOND, other).logits == "cd"


def test_without_a_folder_each_start_measures() -> None:
    measure = Measure()
    known_equality("", FIRST, measure)
    known_equality("", FIRST, measure)
    assert measure.calls == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", b'{"inputs": "%s", "company": 1, "chunk": true, "logits": ""}' % FIRST.encode()],
)
def test_a_broken_file_is_measured_anew_and_replaced(tmp_path: Path, content: bytes) -> None:
    known_equality(str(tmp_path), FIRST, Measure())
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    measure = Measure()
    assert known_equality(str(tmp_path), FIRST, measure) == FOUND
    assert known_equality(str(tmp_path), FIRST, measure) == FOUND
    assert measure.calls == 1


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert known_equality(str(tmp_path / "file" / "folder"), FIRST, Measure()) == FOUND
