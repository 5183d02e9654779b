"""The figures of results that are known."""

import pytest

from caravan_serve.bench.request import ErrorKind, Failure, RequestResult, TokenSource
from caravan_serve.bench.statistics import distribution, percentile, steady_rate, summarise


def result(*times: float, scheduled: float = 0.0, prompt_tokens: int = 10) -> RequestResult:
    return RequestResult(
        scheduled=scheduled,
        ended=times[-1],
        token_times=(times,),
        prompt_tokens=prompt_tokens,
        output_tokens=len(times),
        token_source=TokenSource.USAGE,
    )


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.25, 1.75), (1.0, 4.0)])
def test_a_percentile_is_linear_between_ranks(fraction: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], fraction) == expected


def test_every_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 0.99) == 7.0


def test_a_distribution_does_not_depend_on_the_order() -> None:
    spread = distribution([3.0, 1.0, 2.0])
    assert spread is not None
    assert (spread.count, spread.mean, spread.p50, spread.max) == (3, 2.0, 2.0, 3.0)


def test_no_values_have_no_distribution() -> None:
    assert distribution([]) is None


def test_a_summary_has_rates_and_latencies() -> None:
    summary = summarise([result(1.0, 1.5, 2.0), result(2.0, 3.0, 4.0, scheduled=1.0)])
    assert summary.duration_s == 4.0
    assert summary.output_tokens_per_s == 6 / 4
    assert summary.total_tokens_per_s == 26 / 4
    assert summary.requests_per_s == 0.5
    assert summary.ttft_s is not None
    assert summary.ttft_s.max == 1.0
    assert summary.itl_s is not None
    assert (summary.itl_s.count, summary.itl_s.max) == (4, 1.0)
    assert summary.e2e_s is not None
    assert summary.e2e_s.max == 3.0
    assert summary.token_source == "usage"


def test_failures_are_counted_by_kind_and_not_in_the_rates() -> None:
    failed = [
        RequestResult(scheduled=0.0, ended=8.0, output_tokens=5, failure=Failure(ErrorKind.OVERLOADED, message))
        for message in ("first", "second")
    ]
    summary = summarise([result(1.0, 2.0), *failed])
    assert (summary.requests, summary.completed, summary.output_tokens) == (3, 1, 2)
    assert summary.errors == {"overloaded (429)": 2}
    assert summary.error_samples == {"overloaded (429)": "first"}
    # The run lasts until its last request ends, failed or not.
    assert summary.duration_s == 8.0


def test_a_summary_of_failures_has_no_latencies() -> None:
    summary = summarise([RequestResult(scheduled=0.0, ended=1.0, failure=Failure(ErrorKind.TIMEOUT, "late"))])
    assert summary.output_tokens_per_s == 0.0
    assert summary.ttft_s is None


def test_the_steady_rate_ignores_times_when_a_stream_does_not_decode() -> None:
    slow_start = result(*(float(step) for step in range(11)))
    late = result(*(5.0 + step / 2 for step in range(11)))
    # Window 5..10: one stream at 1 token/s, the other at 2.
    assert steady_rate([slow_start, late]) == pytest.approx(3.0)


def test_streams_that_do_not_overlap_have_no_steady_rate() -> None:
    assert steady_rate([result(0.0, 1.0, 2.0), result(3.0, 4.0, 5.0)]) is None
    assert steady_rate([]) is None


def test_gaps_between_tokens_never_cross_choices() -> None:
    two_choices = RequestResult(
        scheduled=0.0, ended=9.0, token_times=((1.0, 2.0), (8.0, 9.0)), output_tokens=4, prompt_tokens=1
    )
    spread = summarise([two_choices]).itl_s
    assert spread is not None
    assert (spread.count, spread.max) == (2, 1.0)
