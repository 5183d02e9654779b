"""Tokens become pieces of text, which end at stop strings."""

import pytest

from caravan_dialects.text.assembler import Assembler, Piece, TextOptions
from caravan_dialects.text.stops import StopMatch, StopMatcher
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_testing.scripted_engine import EOS_TOKEN, word


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


Shown = list[tuple[str, FinishReason | None]]


def shown(pieces: list[Piece]) -> Shown:
    return [(piece.text, piece.finish) for piece in pieces]


EOS, STOP, LENGTH = FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE, FinishReason.LENGTH
SMILE = "🙂".encode()
BRACE = word("}", finish=EOS)
# The options, and for each token the pieces that it releases.
CASES: dict[str, tuple[TextOptions, list[tuple[GeneratedToken, Shown]]]] = {
    "without stop strings each token is released at once": (
        TextOptions(),
        [(word("a"), [("a", None)]), (EOS_TOKEN, [("", EOS)])],
    ),
    "a token is held while it may begin a stop string": (
        TextOptions(stops=("brown",)),
        [
            (word("the "), [("the ", None)]),
            (word("big b"), []),
            (word("ro"), []),
            (word("ad"), [("big b", None), ("ro", None), ("ad", None)]),
        ],
    ),
    "tokens of a stop string lose its text, and the last has the finish reason": (
        TextOptions(stops=("brown",)),
        [(word("the b"), []), (word("ro"), []), (word("wn fox"), [("the ", None), ("", None), ("", STOP)])],
    ),
    "the end releases text that only looked like a stop string": (
        TextOptions(stops=("brown",)),
        [(word("bro"), []), (EOS_TOKEN, [("bro", None), ("", EOS)])],
    ),
    "a stop string completed by the last token is the finish reason": (
        TextOptions(stops=(".",)),
        [(word("a.", finish=LENGTH), [("a", STOP)])],
    ),
    "an ordinary token that ends a constrained output is shown": (TextOptions(), [(BRACE, [("}", EOS)])]),
    "it is also with stop strings": (TextOptions(stops=("x",)), [(BRACE, [("}", EOS)])]),
    "it is also with special text": (TextOptions(special_text=True), [(BRACE, [("}", EOS)])]),
    "a control token adds no text": (TextOptions(stops=("<s>",)), [(word("<s>", special=True), [("", None)])]),
    "a kept stop string ends the text and nothing waits for it": (
        TextOptions(stops=("brown",), keep_stop=True),
        [(word("the b"), [("the b", None)]), (word("ro"), [("ro", None)]), (word("wn fox"), [("wn", STOP)])],
    ),
    "text of control tokens is shown on request and can stop": (
        TextOptions(stops=("|end>",), special_text=True),
        [(word("<s>", special=True), [("<s>", None)]), (word("<|end>", special=True), [("<", STOP)])],
    ),
    "the end token is not shown with special text only": (TextOptions(special_text=True), [(EOS_TOKEN, [("", EOS)])]),
    "the end token is not shown with stop strings only": (TextOptions(keep_stop=True), [(EOS_TOKEN, [("", EOS)])]),
    "the end token is shown where both are": (
        TextOptions(special_text=True, keep_stop=True),
        [(EOS_TOKEN, [("</s>", EOS)])],
    ),
    "a stop string within the first tokens does not count": (
        TextOptions(stops=("b",), min_tokens=2),
        [(word("ab"), [("ab", None)]), (word("b"), [("b", None)]), (word("cb"), [("c", STOP)])],
    ),
    "a stop string that begins in the first tokens and ends after them counts": (
        TextOptions(stops=("brown",), min_tokens=2),
        [(word("brown b"), []), (word("ro"), []), (word("wn"), [("brown ", None), ("", None), ("", STOP)])],
    ),
}


@pytest.mark.parametrize(("options", "tokens"), CASES.values(), ids=CASES)
def test_what_each_token_releases(options: TextOptions, tokens: list[tuple[GeneratedToken, Shown]]) -> None:
    assembler = Assembler(options)
    assert [shown(assembler.push(token)) for token, _ in tokens] == [expected for _, expected in tokens]


def test_half_a_character_at_the_end_is_flushed_into_the_last_token() -> None:
    assembler = Assembler(TextOptions())
    assert shown(assembler.push(word(SMILE[:2]))) == [("", None)]
    assert shown(assembler.push(word(b"\x99", finish=LENGTH)))[0][0] == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(["the b", "ro"], [("the b", None), ("ro", LENGTH)]), ([b"b" + SMILE[:2]], [("b", LENGTH)])],
)
def test_flush_returns_the_held_pieces_and_drops_half_a_character(tokens: list[str | bytes], expected: Shown) -> None:
    assembler = Assembler(TextOptions(stops=("brown",)))
    assert all(assembler.push(word(token)) == [] for token in tokens)
    assert shown(assembler.flush()) == expected
    assert assembler.flush() == []
