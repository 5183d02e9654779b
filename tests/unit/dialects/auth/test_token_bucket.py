import pytest

from caravan_dialects.auth.client import TokenBucket


def test_a_burst_of_one_minutes_requests_passes_and_then_only_the_rate() -> None:
    bucket = TokenBucket(6, now=100.0)
    assert [bucket.take(100.0) for _ in range(6)] == [0.0] * 6
    assert bucket.take(100.0) == pytest.approx(10.0)
    assert bucket.take(104.0) == pytest.approx(6.0)
    assert bucket.take(110.0) == 0.0
    assert bucket.take(110.0) == pytest.approx(10.0)


def test_a_refused_request_costs_nothing() -> None:
    bucket = TokenBucket(1, now=0.0)
    bucket.take(0.0)
    for second in range(1, 60):
        assert bucket.take(float(second)) > 0
    assert bucket.take(60.0) == 0.0


def test_the_bucket_holds_at_most_one_minutes_requests() -> None:
    bucket = TokenBucket(2, now=0.0)
    assert [bucket.take(1e6) > 0 for _ in range(3)] == [False, False, True]


def test_a_new_rate_does_not_refill_the_bucket() -> None:
    bucket = TokenBucket(10, now=0.0)
    for _ in range(10):
        bucket.take(0.0)
    bucket.set_rate(60, 0.0)
    assert bucket.take(0.0) == pytest.approx(1.0)
    bucket.set_rate(1, 30.0)
    assert [bucket.take(30.0) > 0 for _ in range(2)] == [False, True]
