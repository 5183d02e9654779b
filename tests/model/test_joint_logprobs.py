"""Log probabilities of rows that are computed together are those of numpy, and nearer to the exact ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.kernels.joint_logprobs import LlamaJointLogprobs
from caravan_shard.sampling.logprobs import LogprobRow, row_logprobs, token_logprobs
from caravan_testing.logits import compile_joint_logprobs, kinds_of_logits

pytestmark = pytest.mark.model

SIZES = (49_152, 262_144, 50_257, 600_001, 300, 65, 8, 1)
# What `shard/kernels/src/logprob_rows.c` promises, and what blocks of 128 floats may round in numpy beside that.
EXACT, NUMPY = 2.0**-19, 2.0**-19 + 2.0**-17


@pytest.fixture(scope="module", params=[(), ("-march=native",)], ids=["any processor", "this processor"])
def joint(request: pytest.FixtureRequest) -> LlamaJointLogprobs:
    """The function, with the vectors of any processor of this kind and with those of this one."""
    return compile_joint_logprobs(*request.param)


def check(logits: Floats, rows: list[LogprobRow], joint: LlamaJointLogprobs) -> int:
    """Compare with numpy and with the exact values; return how many rows are not left."""
    found = joint(logits, rows)
    for row, known in zip(rows, found, strict=True):
        if known is None:
            continue
        own = logits[row.place]
        expected = token_logprobs(own, row.token, row.top_n)
        assert known.top_ids == expected.top_ids
        values, others = [known.chosen, *known.top], [expected.chosen, *expected.top]
        # Differences of huge logits round in double too.
        double_rounding = abs(float(own.max())) * 2.0**-51
        np.testing.assert_allclose(values, others, rtol=0, atol=NUMPY + double_rounding)
        double = own.astype(np.float64)
        exact = double - double.max()
        exact -= np.log(np.exp(exact).sum())
        np.testing.assert_allclose(values, exact[[row.token, *known.top_ids]], rtol=1e-14, atol=EXACT + double_rounding)
    return sum(known is not None for known in found)


@pytest.mark.parametrize("size", SIZES)
def test_all_kinds_of_logits(size: int, joint: LlamaJointLogprobs) -> None:
    named = list(kinds_of_logits(size))
    logits = np.stack([row for _, row in named])
    for top_n in sorted({0, 1, min(5, size), min(20, size)}):
        rows = [LogprobRow(place, (7 * place) % size, top_n) for place in range(len(named))]
        assert check(logits, rows, joint) >= len(named) - 5


@given(st.data())
def test_rows_of_any_size_and_count(joint: LlamaJointLogprobs, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 700))
    values = st.sampled_from((0.0, -0.0, 1.5, 1.5000001, -3.0, 80.0, -90.0, -1e30, 3e38, float("-inf")))
    count = data.draw(st.integers(1, 4))
    random = np.random.default_rng(data.draw(st.integers(0, 1_000)))
    logits = random.standard_normal((count, size), np.float32)
    for place in range(count):
        for at in data.draw(st.lists(st.integers(0, size - 1), max_size=12)):
            logits[place, at] = data.draw(values)
    chosen = st.integers(0, size - 1)
    rows = [LogprobRow(place, data.draw(chosen), data.draw(st.integers(0, size))) for place in range(count)]
    with np.errstate(over="ignore"):
        check(logits, rows, joint)


def test_a_row_without_an_answer_is_left_to_numpy(joint: LlamaJointLogprobs) -> None:
    size = 9_000
    with_nan, infinite, nothing = np.zeros((3, size), np.float32)
    with_nan[-1], infinite[7], nothing[:] = np.nan, np.inf, -np.inf
    logits = np.stack([with_nan, infinite, nothing, np.zeros(size, np.float32)])
    assert joint(logits, [LogprobRow(place, 0, 2) for place in range(4)]) == [None] * 4
    # Thousands of equals are left, and get their values all the same.
    (found,) = row_logprobs(logits, [LogprobRow(3, 5, 2)], joint)
    assert found.top_ids == [0, 1]
    assert found.chosen == pytest.approx(-np.log(size), abs=NUMPY)


def test_few_rows_are_left(joint: LlamaJointLogprobs) -> None:
    """What is always left would be right too, and slow."""
    for name, logits in kinds_of_logits(49_152):
        if name.startswith("normal") or name in ("peaked", "model", "masked"):
            assert joint(logits[None], [LogprobRow(0, 3, 20)])[0] is not None, name
