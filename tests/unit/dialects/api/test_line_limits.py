"""Where editors want an output to end."""

from collections.abc import Sequence

import pytest

from caravan_dialects.api.llama_server.reply import LineLimits


def splits(text: str) -> list[list[str]]:
    """Return ``text`` in one part, in its characters, and in two parts at each place."""
    return [[text], list(text), *([text[:place], text[place:]] for place in range(1, len(text)))]


def kept(limits: LineLimits, parts: Sequence[str]) -> str:
    found = ""
    for part in parts:
        found += limits.take(part)
        if limits.ended:
            break
    return found


@pytest.mark.parametrize(
    ("indent", "text", "expected"),
    [
        (0, "a\nb\n", "a\nb\n"),
        (4, "a\n    b\n\t\t\t\tc\n  d", "a\n    b\n\t\t\t\tc\n  "),
        (1, "a\n\nb", "a\n"),
        (1, "    a\n b", "    a\n b"),
        (2, "a\n  ", "a\n  "),
    ],
)
def test_a_line_that_is_indented_less_ends_the_output(indent: int, text: str, expected: str) -> None:
    for parts in splits(text):
        limits = LineLimits(indent, 0.0)
        assert kept(limits, parts) == expected
        assert limits.ended == (expected != text)
        assert limits.has_new_line


def test_the_first_line_end_after_the_time_ends_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("caravan_dialects.api.llama_server.reply.time.monotonic", lambda: now)
    limits = LineLimits(0, 2.0)
    assert limits.take("a\nb") == "a\nb"
    now = 102.5
    assert limits.take("c d") == "c d"
    assert not limits.ended
    assert limits.take("e\nf\n") == "e\n"
    assert limits.ended
