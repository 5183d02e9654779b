"""Bounds from times of the bare engine."""

import pytest
from bench.bounds import (
    Attention,
    BoundOf,
    EngineRun,
    EngineTime,
    choices,
    decoding,
    shared_prefix,
    whole,
    whole_with_prompt,
)

RUN = EngineRun(prompt_tokens=110, output_tokens=64, sequences=8)
TIME = EngineTime(prefill_s=1.5, decode_s=2.5)


@pytest.mark.parametrize(
    ("bound_of", "expected"),
    [
        (whole(8, 64), 8 * 64 / 4.0),
        (whole_with_prompt(8, 64), 8 * (110 + 64) / 4.0),
        (decoding(8, 64), 8 * 64 / 2.5),
    ],
)
def test_a_full_batch_takes_the_time_of_its_prefill_and_its_decoding(bound_of: BoundOf, expected: float) -> None:
    assert bound_of(110).tokens_per_s({Attention.FLASH: {RUN: TIME}}) == expected


def test_the_attention_that_is_better_for_the_whole_row_sets_the_bound() -> None:
    plain = EngineTime(prefill_s=1.6, decode_s=2.0)
    engine = {Attention.FLASH: {RUN: TIME}, Attention.PLAIN: {RUN: plain}}
    assert whole(8, 64)(110).tokens_per_s(engine) == 8 * 64 / 3.6
    late = {Attention.FLASH: {RUN: TIME}, Attention.PLAIN: {RUN: EngineTime(prefill_s=2.5, decode_s=2.0)}}
    assert whole(8, 64)(110).tokens_per_s(late) == 8 * 64 / 4.0


def test_choices_share_one_prompt() -> None:
    run = EngineRun(prompt_tokens=110, output_tokens=64, sequences=8, shared=True)
    assert choices(8, 64)(110).tokens_per_s({Attention.FLASH: {run: TIME}}) == 8 * 64 / 4.0


def test_a_shared_prefix_is_prefilled_once_and_its_tails_in_every_wave() -> None:
    prefix = EngineRun(prompt_tokens=600, output_tokens=32, sequences=8, shared=True)
    tails = EngineRun(prompt_tokens=30, output_tokens=1, sequences=8)
    times = {prefix: EngineTime(prefill_s=2.0, decode_s=1.0), tails: EngineTime(prefill_s=0.5, decode_s=9.0)}
    bound = shared_prefix(8, 32, waves=2, tail_share=30 / 630)(630)
    assert bound.tokens_per_s({Attention.PLAIN: times}) == 2 * 8 * 32 / (2.0 + 2 * 1.0 + 2 * 0.5)
