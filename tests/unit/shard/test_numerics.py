"""A shard finds out whether tokens have the same logits alone and together, and what a start found out is kept."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.numerics import Equality, NumericsProbe, known_equality

FIRST, SECOND = "a" * 64, "a" * 32 + "b" * 32
FOUND = Equality(company=True, chunk=None, logits="12ab")


class Logits:
    """Makes logits of a token and its position, rounded otherwise in batches that ``rounds_otherwise`` picks."""

    def __init__(self, rounds_otherwise: Callable[[TokenBatch], bool]) -> None:
        self._rounds_otherwise = rounds_otherwise
        self._last: TokenBatch
        self.memory = Mock()

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        self._last = batch
        return DecodeOutcome.OK

    def read(self, rows: int) -> Floats:
        (row,) = np.flatnonzero(self._last.outputs)
        value = np.float32(1000 * self._last.positions[row] + self._last.tokens[row])
        if self._rounds_otherwise(self._last):
            value = np.nextafter(value, np.float32(0))
        return np.full((rows, 3), value, np.float32)

    def probe(self) -> NumericsProbe:
        return NumericsProbe(self.decode, self.read, self.memory, 1000)


def rows(batch: TokenBatch) -> int:
    return len(batch.tokens)


def sequences(batch: TokenBatch) -> int:
    return len(np.unique(batch.sequence_ids))


def cells(batch: TokenBatch) -> int:
    return int(batch.positions.min()) if sequences(batch) == 1 else int(batch.positions.max())


@pytest.mark.parametrize(
    ("rounds_otherwise", "thorough", "company", "chunk"),
    [
        (lambda _batch: False, False, True, True),
        (lambda _batch: False, True, True, True),
        (lambda batch: rows(batch) > 1 and cells(batch) >= 256, False, False, False),
        (lambda batch: sequences(batch) >= 8, False, False, True),
        (lambda batch: rows(batch) == 2 and sequences(batch) == 1, True, True, False),
        (lambda batch: rows(batch) >= 64, False, True, True),
        (lambda batch: rows(batch) >= 64, True, True, False),
    ],
)
def test_a_token_is_compared_alone_beside_others_and_in_chunks(
    rounds_otherwise: Callable[[TokenBatch], bool], *, thorough: bool, company: bool, chunk: bool
) -> None:
    logits = Logits(rounds_otherwise)
    found = logits.probe().measure(longest=512, sequences=8, rows=512, thorough=thorough)
    assert (found.company, found.chunk) == (company, chunk)
    logits.memory.fill_cells.assert_any_call(0, 300)
    logits.memory.clear.assert_called_once_with()


def test_the_fingerprint_depends_on_the_logits_alone() -> None:
    sizes = {"longest": 512, "sequences": 8, "rows": 512}
    same = [Logits(lambda _batch: False).probe().measure(**sizes, thorough=False).logits for _ in range(2)]
    other = Logits(lambda batch: rows(batch) == 1).probe().measure(**sizes, thorough=False).logits
    assert same[0] == same[1] != other


def test_what_does_not_fit_is_not_compared() -> None:
    logits = Logits(lambda _batch: False)
    found = logits.probe().measure(longest=64, sequences=8, rows=512, thorough=True)
    assert (found.company, found.chunk) == (None, None)
    found = logits.probe().measure(longest=256, sequences=1, rows=512, thorough=False)
    assert (found.company, found.chunk) == (None, True)


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
