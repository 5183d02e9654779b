"""Bytes of tokens become text, and each token of a prompt has its part of the text."""

import pytest

from caravan_dialects.text.detokenize import IncrementalDecoder, as_decoded, as_written, token_spans
from caravan_proto.messages.model import TokenizedText

SMILE = "🙂".encode()


def test_a_character_split_over_tokens_is_held_back_until_it_is_whole() -> None:
    decoder = IncrementalDecoder()
    assert [decoder.push(bytes([byte])) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert decoder.flush() == ""


def test_invalid_bytes_become_replacement_characters_at_once() -> None:
    decoder = IncrementalDecoder()
    assert decoder.push(b"a\xffb") == "a\N{REPLACEMENT CHARACTER}b"


def test_an_unfinished_character_at_the_end_becomes_a_replacement_character() -> None:
    decoder = IncrementalDecoder()
    assert decoder.push("🙂".encode()[:3]) == ""
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}"


def tokenized(*pieces: bytes, specials: int = 0) -> TokenizedText:
    """Return tokens with the given bytes, the first ``specials`` of which are control tokens."""
    count = len(pieces)
    return TokenizedText(tuple(range(count)), pieces, tuple(index < specials for index in range(count)))


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


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        # Spans count characters.
        ("né no", tokenized("né".encode(), b" no"), [(0, 2), (2, 5)]),
        # A control token that is not in the text has an empty span, and one that is has a span.
        ("ab", tokenized(b"<s>", b"ab", specials=1), [(0, 0), (0, 2)]),
        ("<s>ab", tokenized(b"<s>", b"ab", specials=1), [(0, 3), (3, 5)]),
        # A space that the tokenizer adds in front is not part of the text.
        ("ab c", tokenized(b" ab", b" c"), [(0, 2), (2, 4)]),
        # A character split over tokens is in the span of each.
        ("a🙂b", tokenized(b"a", SMILE[:2], SMILE[2:], b"b"), [(0, 1), (1, 2), (1, 2), (2, 3)]),
    ],
)
def test_the_span_of_each_token(text: str, tokens: TokenizedText, expected: list[tuple[int, int]]) -> None:
    assert [(span.start, span.stop) for span in token_spans(text, tokens)] == expected
