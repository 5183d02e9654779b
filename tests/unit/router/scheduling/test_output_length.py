import random

import pytest

from caravan_router.scheduling.planning.output_length import OutputLengths


def lengths(*observed: int, window: int = 512) -> OutputLengths:
    result = OutputLengths(window)
    for length in observed:
        result.observe(length)
    return result


def test_the_worst_case_until_enough_ended() -> None:
    assert lengths().expected(0, 100) == 100
    assert lengths(*[5] * 15).expected(0, 100) == 100
    assert lengths(*[5] * 16).expected(0, 100) == 5


def test_four_of_five_are_no_longer() -> None:
    outputs = lengths(*range(1, 101))
    assert outputs.expected(0, 1000) == 81
    assert outputs.expected(50, 1000) == 91, "of those that got as far"
    assert outputs.expected(99, 1000) == 100


def test_never_above_what_it_may_nor_below_what_it_has() -> None:
    outputs = lengths(*range(1, 101))
    assert outputs.expected(0, 10) == 10
    assert outputs.expected(10, 10) == 10
    assert outputs.expected(98, 100) == 100
    assert outputs.expected(98, 99) == 99


def test_the_worst_case_for_one_that_is_longer_than_any() -> None:
    assert lengths(*[5] * 100).expected(5, 64) == 64


def test_the_oldest_are_forgotten() -> None:
    outputs = lengths(*[500] * 20, *[10] * 20, window=20)
    assert outputs.expected(0, 1000) == 10
    assert outputs.expected(10, 1000) == 1000


@pytest.mark.parametrize("window", [16, 37, 512])
def test_as_computed_from_the_last_of_all(window: int) -> None:
    rng = random.Random(window)
    outputs = OutputLengths(window)
    observed: list[int] = []
    for _ in range(1500):
        length = int(rng.expovariate(1 / 60)) + 1
        outputs.observe(length)
        observed.append(length)
        generated, most = rng.randrange(200), rng.randrange(1, 400)
        if generated >= most or len(observed) < 16:
            continue
        longer = sorted(length for length in observed[-window:] if length > generated)
        expected = outputs.expected(generated, most)
        assert generated < expected <= most
        if not longer:
            assert expected == most
        elif expected < most:
            assert sum(length <= expected for length in longer) >= 0.8 * len(longer)
            assert sum(length < expected for length in longer) <= 0.8 * len(longer)
        else:
            assert sum(length < most for length in longer) <= 0.8 * len(longer)
