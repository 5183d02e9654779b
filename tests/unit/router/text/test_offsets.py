from caravan_router.core.engine import TokenizedText
from caravan_router.text.offsets import token_spans


def spans(text: str, *tokens: tuple[bytes, bool]) -> list[tuple[int, int]]:
    tokenized = TokenizedText(
        tuple(range(len(tokens))), tuple(piece for piece, _ in tokens), tuple(special for _, special in tokens)
    )
    return [(span.start, span.stop) for span in token_spans(text, tokenized)]


def test_spans_count_characters() -> None:
    assert spans("né no", ("né".encode(), False), (b" no", False)) == [(0, 2), (2, 5)]


def test_a_control_token_that_is_not_in_the_text_takes_none_of_it() -> None:
    assert spans("ab", (b"<s>", True), (b"ab", False)) == [(0, 0), (0, 2)]


def test_a_control_token_that_is_in_the_text_takes_its_own() -> None:
    assert spans("<s>ab", (b"<s>", True), (b"ab", False)) == [(0, 3), (3, 5)]


def test_a_space_the_tokenizer_put_in_front_is_none_of_the_text() -> None:
    assert spans("ab c", (b" ab", False), (b" c", False)) == [(0, 2), (2, 4)]


def test_a_character_split_over_tokens_belongs_to_each() -> None:
    raw = "🙂".encode()
    assert spans("a🙂b", (b"a", False), (raw[:2], False), (raw[2:], False), (b"b", False)) == [
        (0, 1),
        (1, 2),
        (1, 2),
        (2, 3),
    ]
