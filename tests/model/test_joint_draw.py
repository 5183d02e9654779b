"""Rows that are drawn together get the tokens that each of them gets alone; those in doubt are left."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.kernels.joint_draw import LlamaJointDraw
from caravan_shard.backends.llama.sampling.filter import LlamaFilter
from caravan_shard.sampling.choice import Allowed, Choice, choose_token
from caravan_shard.sampling.draw import uniform
from caravan_shard.sampling.joint_draw import LEFT, Row, joint_filters
from caravan_shard.sampling.penalties import make_biases, make_penalties
from caravan_shard.sampling.sampler import Sampler
from caravan_testing.logits import compile_joint_draw, kinds_of_logits

pytestmark = pytest.mark.model

SIZES = (49_152, 50_257, 300, 65, 1)
# As many tokens as Gemma has.
LARGE = 262_144
FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 40},
    {"top_k": 1},
    {"top_k": 5_000},
    {"min_p": 0.05},
    {"min_p": 1e-4},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 200, "top_p": 0.9999},
    {"top_k": 40, "typical_p": 0.9},
    {"top_k": 300, "typical_p": 0.3, "top_p": 0.9, "min_p": 0.02},
    {},
    {"top_p": 0.95},
    {"top_p": 0.5},
    {"top_p": 0.9999},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_p": 0.9, "xtc_probability": 0.6, "xtc_threshold": 0.1},
    {"xtc_probability": 0.6, "xtc_threshold": 0.1},
    {"min_p": 0.02, "xtc_probability": 0.6, "xtc_threshold": 0.1},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "xtc_probability": 0.6, "xtc_threshold": 0.1},
)
CHAIN: dict[str, Any] = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}


@pytest.fixture(scope="module", params=[(), ("-march=native",)], ids=["any processor", "this processor"])
def draw(request: pytest.FixtureRequest) -> LlamaJointDraw:
    """The function, with the vectors of any processor of this kind and with those of this one."""
    return compile_joint_draw(*request.param)


def alone(logits: Floats, choices: Sequence[Choice], chain: LlamaFilter) -> list[int]:
    return [choose_token(row, choice, chain) for row, choice in zip(logits, choices, strict=True)]


def rows(choices: Sequence[Choice]) -> list[Row]:
    """Rows with plain filters, without XTC."""
    made = []
    for index, choice in enumerate(choices):
        filters = joint_filters(choice.parameters)
        assert filters is not None
        mask = None if choice.allowed is None else choice.allowed.mask
        made.append(Row(index, mask, uniform(choice.parameters.seed, choice.position), math.inf, filters))
    return made


def check(size: int, fields: dict[str, Any], draw: LlamaJointDraw) -> None:
    """Compare the tokens of every kind of logits at several temperatures."""
    chain = LlamaFilter(size)
    logits = np.stack([row for _, row in kinds_of_logits(size)])
    sampler = Sampler(chain, 1, draw)
    for seed, temperature in enumerate((0.8, 0.02, 1.7)):
        parameters = SamplingParams(temperature=temperature, seed=seed, **fields)
        choices = [Choice(parameters, position) for position in range(len(logits))]
        assert sampler.choose(logits, choices) == alone(logits, choices, chain), (size, temperature)


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_the_tokens_are_those_of_rows_that_are_drawn_alone(fields: dict[str, Any], draw: LlamaJointDraw) -> None:
    for size in SIZES:
        check(size, fields, draw)


@pytest.mark.parametrize(
    "fields", [pytest.param(fields, marks=[] if fields == CHAIN else [pytest.mark.slow]) for fields in FILTERS], ids=str
)
def test_the_tokens_of_a_large_vocabulary_are_those_of_rows_that_are_drawn_alone(
    fields: dict[str, Any], draw: LlamaJointDraw
) -> None:
    check(LARGE, fields, draw)


@given(st.data())
def test_a_step_mixes_rows_of_all_kinds(draw: LlamaJointDraw, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from((8, 65, 300, 5_000)))
    random = np.random.default_rng(data.draw(st.integers(0, 1_000)))
    count = data.draw(st.integers(1, 6))
    scale = np.float32(data.draw(st.sampled_from((0.1, 1.0, 4.0))))
    logits = random.standard_normal((count, size), np.float32) * scale
    choices = []
    for position in range(count):
        fields: dict[str, Any] = {
            "temperature": data.draw(st.sampled_from((0.0, 0.7, 1.0))),
            "top_k": data.draw(st.sampled_from((0, 1, 20))),
            "top_p": data.draw(st.sampled_from((1.0, 0.9))),
            "typical_p": data.draw(st.sampled_from((1.0, 1.0, 0.7))),
            "min_p": data.draw(st.sampled_from((0.0, 0.1))),
            "xtc_probability": data.draw(st.sampled_from((0.0, 0.0, 0.5))),
            "repetition_penalty": data.draw(st.sampled_from((1.0, 1.3))),
            "dry_multiplier": data.draw(st.sampled_from((0.0, 0.8))),
            "biases": data.draw(st.sampled_from(((), ((1, 2.5), (0, -3.0))))),
            "dynatemp_range": data.draw(st.sampled_from((0.0, 0.0, 0.3))),
        }
        parameters = SamplingParams(seed=position, **fields)
        penalties = make_penalties(parameters, lambda token: b"%d" % token)
        for penalty in penalties:
            penalty.add(random.integers(0, min(size, 9), 20).tolist(), output=True)
        allowed = None
        if data.draw(st.booleans()):
            flags = random.random(size + 5) < data.draw(st.sampled_from((0.02, 0.5, 1.0)))
            flags[random.integers(0, size)] = True
            allowed = Allowed.from_mask(np.packbits(flags, bitorder="little"), size)
        barred = data.draw(st.sampled_from((frozenset(), frozenset({2, 5}))))
        biases = make_biases(parameters.biases)
        choices.append(Choice(parameters, position, penalties, allowed, barred, biases=biases))
    before = logits.copy()
    chain = LlamaFilter(size)
    expected = alone(logits, choices, chain)
    for threads in (1, 2):
        sampler = Sampler(chain, threads, draw)
        assert sampler.choose(logits, choices) == expected
        sampler.close()
        assert (logits == before).all()


def test_few_rows_are_left(draw: LlamaJointDraw) -> None:
    """What is always left would be right too, and slow."""
    size = 49_152
    for name, logits in kinds_of_logits(size):
        if name.startswith("normal") or name in ("peaked", "model", "masked"):
            parameters = SamplingParams(temperature=0.8, seed=1, **CHAIN)
            choices = [Choice(parameters, position) for position in range(500)]
            found = draw(np.tile(logits, (1, 1)), [row._replace(place=0) for row in rows(choices)])
            assert found.count(LEFT) <= 10, name


@pytest.mark.parametrize("fields", [{}, {"top_k": 40, "typical_p": 0.9}, {"top_p": 0.95}], ids=str)
def test_few_rows_with_other_filters_are_left(fields: dict[str, Any], draw: LlamaJointDraw) -> None:
    for name, logits in kinds_of_logits(49_152):
        if name in ("peaked", "model"):
            parameters = SamplingParams(temperature=0.8, seed=1, **fields)
            choices = [Choice(parameters, position) for position in range(200)]
            found = draw(np.tile(logits, (1, 1)), [row._replace(place=0) for row in rows(choices)])
            assert found.count(LEFT) <= 20, name


def test_what_rounding_could_decide_is_left(draw: LlamaJointDraw) -> None:
    """Halves of the probability, at whose border the number lies; and a top_p that is just what one token has."""
    logits = np.zeros((1, 512), np.float32)
    (row,) = rows([Choice(SamplingParams(temperature=0.8), 0)])
    found = [draw(logits, [row._replace(number=number)])[0] for number in (0.49999, 0.5, 0.5 + 1e-7, 0.50001)]
    assert found == [255, LEFT, LEFT, 256]
    logits = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    (row,) = rows([Choice(SamplingParams(temperature=1.0, top_p=0.5), 0)])
    found = [draw(logits, [row._replace(number=number)])[0] for number in (0.3, 0.9)]
    assert found == [0, LEFT]
    (row,) = rows([Choice(SamplingParams(temperature=1.0, top_p=0.6), 0)])
    # One of the equal ones is kept: llama.cpp's sort decides which.
    found = [draw(logits, [row._replace(number=number)])[0] for number in (0.3, 0.9)]
    assert found == [0, LEFT]


@pytest.mark.parametrize("mask", [False, True])
def test_doubtful_rows_are_left(draw: LlamaJointDraw, *, mask: bool) -> None:
    size = 1_000
    normal = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    with_nan, infinite, nothing = normal.copy(), normal.copy(), np.full(size, -np.inf, np.float32)
    with_nan[-1] = np.nan
    infinite[7] = np.inf
    allowed = Allowed.from_mask(np.full(125, 255, np.uint8), size) if mask else None
    logits = np.stack([with_nan, infinite, nothing, np.zeros(size, np.float32)])
    choices = [Choice(SamplingParams(temperature=0.8, **CHAIN), 0, allowed=allowed)] * len(logits)
    assert draw(logits, rows(choices)) == [LEFT] * len(logits)


def test_a_number_at_the_border_of_two_tokens_is_left(draw: LlamaJointDraw) -> None:
    logits = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    (row,) = rows([Choice(SamplingParams(temperature=1.0, min_p=0.1), 0)])
    found = [draw(logits, [row._replace(number=number)])[0] for number in (0.2, 0.25, 0.2500001, 0.26, 0.75, 0.8)]
    assert found == [0, LEFT, LEFT, 1, LEFT, 2]


def test_greedy_takes_the_first_of_the_highest_that_the_mask_allows(draw: LlamaJointDraw) -> None:
    logits = np.zeros((1, 700), np.float32)
    logits[0, [300, 310, 650]] = 5.0, 4.0, 4.0
    allowed = Allowed.from_mask(np.packbits(np.arange(700) > 300, bitorder="little"), 700)
    assert draw(logits, rows([Choice(SamplingParams(temperature=0.0), 0)])) == [300]
    assert draw(logits, rows([Choice(SamplingParams(temperature=0.0), 0, allowed=allowed)])) == [310]


def test_threads_share_the_rows() -> None:
    shared = compile_joint_draw("-fopenmp", threads=3)
    logits = np.random.default_rng(3).normal(0.0, 3.0, (16, 40_000)).astype(np.float32)

    def started() -> int:
        """How many threads the first draw of a thread starts."""
        # As a set: threads of earlier tests may end meanwhile.
        before = {*Path("/proc/self/task").iterdir()}
        shared(logits, rows([Choice(SamplingParams(temperature=0.0), 0) for _ in logits]))
        return len({*Path("/proc/self/task").iterdir()} - before)

    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(started).result() == 2
    for fields in (CHAIN, {}, {"temperature": 0.0}):
        choices = [Choice(SamplingParams(seed=row, **fields), row) for row in range(16)]
        tokens = shared(logits, rows(choices))
        drawn = [place for place, token in enumerate(tokens) if token != LEFT]
        assert len(drawn) >= 15
        one_by_one = alone(logits, choices, LlamaFilter(logits.shape[1]))
        assert [tokens[place] for place in drawn] == [one_by_one[place] for place in drawn]


def test_a_large_argmax_is_shared() -> None:
    size = 130_000
    shared = compile_joint_draw("-fopenmp", threads=3)
    logits = np.random.default_rng(4).normal(0.0, 3.0, (8, size)).astype(np.float32)
    logits[2, 5:9] = 40.0
    logits[3] = np.nan
    logits[4, size - 1] = np.inf
    choices = [Choice(SamplingParams(temperature=0.0), 0) for _ in logits]
    choices[1] = Choice(SamplingParams(seed=1, **CHAIN), 7)
    chain = LlamaFilter(size)
    drawn: list[int] = []

    class Noticed:
        threads = shared.threads

        def __call__(self, logits: Floats, rows: Sequence[Row], /) -> list[int]:
            drawn.extend(row.place for row in rows)
            return shared(logits, rows)

    found = Sampler(chain, 1, Noticed()).choose(logits, choices)
    assert drawn == [*range(8)]
    assert found == alone(logits, choices, chain)
    assert found[2] == 5
