from caravan_dialects.text.assembler import Assembler, Piece, TextOptions
from caravan_proto.messages.results import FinishReason
from caravan_testing.scripted_engine import EOS_TOKEN, word


def assembler_for(*stops: str, keep_stop: bool = False, special_text: bool = False, min_tokens: int = 0) -> Assembler:
    return Assembler(TextOptions(stops=stops, keep_stop=keep_stop, special_text=special_text, min_tokens=min_tokens))


def shown(pieces: list[Piece]) -> list[tuple[str, FinishReason | None]]:
    return [(piece.text, piece.finish) for piece in pieces]


def test_without_stop_strings_each_token_is_released_at_once() -> None:
    assembler = assembler_for()
    assert shown(assembler.push(word("a"))) == [("a", None)]
    assert shown(assembler.push(EOS_TOKEN)) == [("", FinishReason.EOS_TOKEN)]


def test_a_token_is_held_while_it_may_begin_a_stop_string() -> None:
    assembler = assembler_for("brown")
    assert shown(assembler.push(word("the "))) == [("the ", None)]
    assert shown(assembler.push(word("big b"))) == []
    assert shown(assembler.push(word("ro"))) == []
    assert shown(assembler.push(word("ad"))) == [("big b", None), ("ro", None), ("ad", None)]


def test_tokens_of_a_stop_string_lose_its_text_and_the_last_has_the_finish_reason() -> None:
    assembler = assembler_for("brown")
    assert shown(assembler.push(word("the b"))) == []
    assert shown(assembler.push(word("ro"))) == []
    assert shown(assembler.push(word("wn fox"))) == [("the ", None), ("", None), ("", FinishReason.STOP_SEQUENCE)]


def test_the_end_releases_text_that_only_looked_like_a_stop_string() -> None:
    assembler = assembler_for("brown")
    assert shown(assembler.push(word("bro"))) == []
    assert shown(assembler.push(EOS_TOKEN)) == [("bro", None), ("", FinishReason.EOS_TOKEN)]


def test_a_stop_string_completed_by_the_last_token_is_the_finish_reason() -> None:
    assembler = assembler_for(".")
    assert shown(assembler.push(word("a.", finish=FinishReason.LENGTH))) == [("a", FinishReason.STOP_SEQUENCE)]


def test_half_a_character_at_the_end_is_flushed_into_the_last_token() -> None:
    assembler = assembler_for()
    assert shown(assembler.push(word("🙂".encode()[:2]))) == [("", None)]
    assert shown(assembler.push(word(b"\x99", finish=FinishReason.LENGTH)))[0][0] == "\N{REPLACEMENT CHARACTER}"


def test_an_ordinary_token_that_ends_a_constrained_output_is_shown() -> None:
    for assembler in (assembler_for(), assembler_for("x"), assembler_for(special_text=True)):
        assert shown(assembler.push(word("}", finish=FinishReason.EOS_TOKEN))) == [("}", FinishReason.EOS_TOKEN)]


def test_a_control_token_adds_no_text() -> None:
    assembler = assembler_for("<s>")
    assert shown(assembler.push(word("<s>", special=True))) == [("", None)]


def test_a_kept_stop_string_ends_the_text_and_nothing_waits_for_it() -> None:
    assembler = assembler_for("brown", keep_stop=True)
    assert shown(assembler.push(word("the b"))) == [("the b", None)]
    assert shown(assembler.push(word("ro"))) == [("ro", None)]
    assert shown(assembler.push(word("wn fox"))) == [("wn", FinishReason.STOP_SEQUENCE)]


def test_text_of_control_tokens_is_shown_on_request_and_can_stop() -> None:
    assembler = assembler_for("|end>", special_text=True)
    assert shown(assembler.push(word("<s>", special=True))) == [("<s>", None)]
    assert shown(assembler.push(word("<|end>", special=True))) == [("<", FinishReason.STOP_SEQUENCE)]


def test_the_end_token_is_shown_only_where_special_text_and_stop_strings_are() -> None:
    assert shown(assembler_for(special_text=True).push(EOS_TOKEN)) == [("", FinishReason.EOS_TOKEN)]
    assert shown(assembler_for(keep_stop=True).push(EOS_TOKEN)) == [("", FinishReason.EOS_TOKEN)]
    both = assembler_for(special_text=True, keep_stop=True)
    assert shown(both.push(EOS_TOKEN)) == [("</s>", FinishReason.EOS_TOKEN)]


def test_an_ordinary_token_that_ends_the_sequence_is_shown() -> None:
    """A grammar may end a sequence with one."""
    assert shown(assembler_for().push(word("}", finish=FinishReason.EOS_TOKEN))) == [("}", FinishReason.EOS_TOKEN)]


def test_a_stop_string_within_the_first_tokens_does_not_count() -> None:
    assembler = assembler_for("b", min_tokens=2)
    assert shown(assembler.push(word("ab"))) == [("ab", None)]
    assert shown(assembler.push(word("b"))) == [("b", None)]
    assert shown(assembler.push(word("cb"))) == [("c", FinishReason.STOP_SEQUENCE)]


def test_a_stop_string_that_begins_in_the_first_tokens_and_ends_after_them_counts() -> None:
    assembler = assembler_for("brown", min_tokens=2)
    assert shown(assembler.push(word("brown b"))) == []
    assert shown(assembler.push(word("ro"))) == []
    assert shown(assembler.push(word("wn"))) == [("brown ", None), ("", None), ("", FinishReason.STOP_SEQUENCE)]


def test_flush_returns_the_held_pieces_and_marks_the_last() -> None:
    assembler = assembler_for("brown")
    assert shown(assembler.push(word("the b"))) == []
    assert shown(assembler.push(word("ro"))) == []
    assert shown(assembler.flush()) == [("the b", None), ("ro", FinishReason.LENGTH)]
    assert assembler.flush() == []


def test_flush_drops_half_a_character() -> None:
    assembler = assembler_for("brown")
    assert shown(assembler.push(word(b"b" + "🙂".encode()[:2]))) == []
    assert shown(assembler.flush()) == [("b", FinishReason.LENGTH)]
