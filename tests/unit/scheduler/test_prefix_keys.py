"""Keys of prefixes stand for all tokens before a position."""

import pytest

from caravan_scheduler.prefix_keys import BLOCK_TOKENS, PrefixKeys, cuts_between


def keys(tokens: list[int], namespace: str = "") -> PrefixKeys:
    return PrefixKeys(namespace, lambda start, stop: tokens[start:stop])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 48])
def test_equal_prefixes_have_equal_keys_and_others_have_not(length: int) -> None:
    tokens = list(range(60))
    key = keys(tokens).at(length)
    assert len(key) == 16
    assert keys([*tokens[:length], 99]).at(length) == key, "what follows does not matter"
    assert keys(tokens, "salt").at(length) != key
    for place in (0, length - 1):
        other = [*tokens[:place], 99, *tokens[place + 1 :]]
        assert keys(other).at(length) != key
    assert len({keys(tokens).at(one) for one in range(61)}) == 61


def test_keys_are_the_same_in_every_order_of_questions() -> None:
    tokens = list(range(60))
    asked = keys(tokens)
    backwards = [asked.at(length) for length in range(60, -1, -1)]
    assert backwards[::-1] == [keys(tokens).at(length) for length in range(61)]


def test_keys_never_change_since_files_are_named_by_them() -> None:
    assert keys(list(range(40)), "alice").at(40).hex() == "7e8f6af9fd4b6f18953824700f40f9f3"


@pytest.mark.parametrize(
    ("start", "end", "cuts"), [(0, 10, [10]), (0, 16, [16]), (0, 40, [16, 32, 40]), (40, 64, [48, 64]), (16, 17, [17])]
)
def test_a_run_can_be_cut_at_whole_blocks_and_its_end(start: int, end: int, cuts: list[int]) -> None:
    assert BLOCK_TOKENS == 16
    assert cuts_between(start, end) == cuts
