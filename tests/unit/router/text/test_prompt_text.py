import pytest

from caravan_router.core.engine import TokenizedText
from caravan_router.text.prompt_text import as_decoded, as_written


def tokenized(*pieces: bytes, specials: int = 0) -> TokenizedText:
    """The first ``specials`` are control tokens."""
    count = len(pieces)
    return TokenizedText(tuple(range(count)), pieces, tuple(index < specials for index in range(count)))


SMILE = "🙂".encode()


@pytest.mark.parametrize(
    ("text", "tokens", "texts"),
    [
        ("hi you", tokenized(b"<s>", b"hi", b" you", specials=1), ("", "hi", " you")),
        # A tokenizer that puts a space before the text.
        ("hi you", tokenized(b" hi", b" you"), ("hi", " you")),
        ("a🙂b", tokenized(b"a", SMILE[:2], SMILE[2:], b"b"), ("a", "🙂", "", "b")),
        # One that normalises: nothing is lost, wherever it lands.
        ("ﬁx!", tokenized(b"fi", b"x"), ("ﬁ", "x!")),
        ("", tokenized(), ()),
    ],
)
def test_texts_joined_are_what_was_written(text: str, tokens: TokenizedText, texts: tuple[str, ...]) -> None:
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
def test_tokens_as_text(tokens: TokenizedText, texts: tuple[str, ...]) -> None:
    assert as_decoded(tokens).texts == texts
