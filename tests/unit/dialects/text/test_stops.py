import pytest

from caravan_dialects.text.stops import StopMatch, StopMatcher


def test_held_is_the_longest_suffix_that_may_begin_a_stop_string() -> None:
    matcher = StopMatcher(["\n\nUser", "aab"])
    held = [(matcher.feed(text), matcher.held) for text in ("x", "\n", "\nU", "s", "z", "aaa")]
    assert held == [(None, 0), (None, 1), (None, 3), (None, 4), (None, 0), (None, 2)]


def test_a_match_over_several_pieces_is_found() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.feed("so st") is None
    assert matcher.feed("o") is None
    assert matcher.feed("p!") == StopMatch(3, 7, "stop")


@pytest.mark.parametrize("cut", [(("abc",)), (("a", "bc")), (("ab", "c"))])
def test_the_first_stop_string_to_be_completed_wins_however_the_text_is_split(cut: tuple[str, ...]) -> None:
    matcher = StopMatcher(["abc", "b"])
    found = next(match for match in map(matcher.feed, cut) if match)
    assert found == StopMatch(1, 2, "b")


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert StopMatcher(["b", "xab", "ab"]).feed("xab") == StopMatch(0, 3, "xab")


def test_an_ignored_match_may_overlap_one_that_counts() -> None:
    matcher = StopMatcher(["aba"])
    assert matcher.feed("aba", ignore_matches=True) is None
    assert matcher.held == 1
    assert matcher.feed("ba") == StopMatch(2, 5, "aba")
