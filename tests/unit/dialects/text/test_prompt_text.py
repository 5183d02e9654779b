import pytest

from caravan_dialects.text.detokenize import as_decoded, as_written, token_spans
from caravan_proto.messages.model import TokenizedText


def tokenized(*pieces: bytes, specials: int = 0) -> TokenizedText:
    """Return tokens with the given bytes, the first ``specials`` of which are control tokens."""
    count = len(pieces)
    return TokenizedText(tuple(range(count)), pieces, tuple(index < specials for index in range(count)))


SMILE = "🙂".encode()


@pytest.mark.parametrize(
    ("text", "tokens", "texts"),
    [
        ("hi you", tokenized(b"<s>", b"hi", b" you", specials=1), ("", "hi", " you")),
        # This tokenizer puts a space before the text.
        ("hi you", tokenized(b" hi", b" you"), ("hi", " you")),
        ("a🙂b", tokenized(b"a", SMILE[:2], SMILE[2:], b"b"), ("a", "🙂", "", "b")),
        # This tokenizer normalises the text; no character is lost, whichever token gets it.
        ("ﬁx!", tokenized(b"fi", b"x"), ("ﬁ", "x!")),
        ("", tokenized(), ()),
    ],
)
def test_the_texts_of_tokens_joined_are_the_prompt_as_written(
    text: str, tokens: TokenizedText, texts: tuple[str, ...]
) -> None:
    prompt = as_written(text, tokens)
    assert prompt.text == text
    assert len(prompt.texts) == len(tokens.pieces)
    assert prompt.texts == texts


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        (tokenized(b"<s>", b"hi", specials=1), ("<s>", "hi")),
        (tokenized(b"a", SMILE[:2], SMILE[2:]), ("a", "", "🙂")),
        (tokenized(b"a", SMILE[:2]), ("a", "\ufffd")),
        (tokenized(), ()),
    ],
)
def test_a_prompt_of_tokens_is_decoded_to_their_texts(tokens: TokenizedText, texts: tuple[str, ...]) -> None:
    assert as_decoded(tokens).texts == texts


def spans(text: str, *tokens: tuple[bytes, bool]) -> list[tuple[int, int]]:
    tokenized = TokenizedText(
        tuple(range(len(tokens))), tuple(piece for piece, _ in tokens), tuple(special for _, special in tokens)
    )
    return [(span.start, span.stop) for span in token_spans(text, tokenized)]


def test_spans_count_characters() -> None:
    assert spans("né no", ("né".encode(), False), (b" no", False)) == [(0, 2), (2, 5)]


def test_a_control_token_that_is_not_in_the_text_has_an_empty_span() -> None:
    assert spans("ab", (b"<s>", True), (b"ab", False)) == [(0, 0), (0, 2)]


def test_a_control_token_that_is_in_the_text_has_a_span() -> None:
    assert spans("<s>ab", (b"<s>", True), (b"ab", False)) == [(0, 3), (3, 5)]


def test_a_space_that_the_tokenizer_adds_in_front_is_not_part_of_the_text() -> None:
    assert spans("ab c", (b" ab", False), (b" c", False)) == [(0, 2), (2, 4)]


def test_a_character_split_over_tokens_is_in_the_span_of_each() -> None:
    raw = "🙂".encode()
    assert spans("a🙂b", (b"a", False), (raw[:2], False), (raw[2:], False), (b"b", False)) == [
        (0, 1),
        (1, 2),
        (1, 2),
        (2, 3),
    ]
