from caravan_router.core.sampling import FinishReason
from caravan_router.text.assembler import Assembler, Piece
from caravan_testing.scripted_engine import EOS_TOKEN, word


def shown(pieces: list[Piece]) -> list[tuple[str, FinishReason | None]]:
    return [(piece.text, piece.finish) for piece in pieces]


def test_without_stop_strings_each_token_leaves_at_once() -> None:
    assembler = Assembler([])
    assert shown(assembler.push(word("a"))) == [("a", None)]
    assert shown(assembler.push(EOS_TOKEN)) == [("", FinishReason.EOS_TOKEN)]


def test_a_token_waits_while_it_may_begin_a_stop_string_and_leaves_with_the_next() -> None:
    assembler = Assembler(["brown"])
    assert shown(assembler.push(word("the "))) == [("the ", None)]
    assert shown(assembler.push(word("big b"))) == []
    assert shown(assembler.push(word("ro"))) == []
    assert shown(assembler.push(word("ad"))) == [("big b", None), ("ro", None), ("ad", None)]


def test_tokens_of_a_stop_string_are_trimmed_and_the_last_says_why() -> None:
    assembler = Assembler(["brown"])
    assert shown(assembler.push(word("the b"))) == []
    assert shown(assembler.push(word("ro"))) == []
    assert shown(assembler.push(word("wn fox"))) == [("the ", None), ("", None), ("", FinishReason.STOP_SEQUENCE)]


def test_an_end_releases_what_only_looked_like_a_stop_string() -> None:
    assembler = Assembler(["brown"])
    assert shown(assembler.push(word("bro"))) == []
    assert shown(assembler.push(EOS_TOKEN)) == [("bro", None), ("", FinishReason.EOS_TOKEN)]


def test_a_stop_string_completed_by_the_last_token_is_the_reason() -> None:
    assembler = Assembler(["."])
    assert shown(assembler.push(word("a.", finish=FinishReason.LENGTH))) == [("a", FinishReason.STOP_SEQUENCE)]


def test_half_a_character_at_the_end_is_flushed_into_the_last_token() -> None:
    assembler = Assembler([])
    assert shown(assembler.push(word("🙂".encode()[:2]))) == [("", None)]
    assert shown(assembler.push(word(b"\x99", finish=FinishReason.LENGTH)))[0][0] == "\N{REPLACEMENT CHARACTER}"


def test_a_control_token_adds_no_text() -> None:
    assembler = Assembler(["<s>"])
    assert shown(assembler.push(word("<s>", special=True))) == [("", None)]
