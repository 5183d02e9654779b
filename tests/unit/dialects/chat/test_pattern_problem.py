"""Errors in regular expressions that llguidance does not find."""

import re
from random import Random

import pytest

from caravan_dialects.chat.schema_values import ends_in_escape, pattern_problem

ESCAPE = "the regular expression ends with a backslash that escapes nothing"


@pytest.mark.parametrize("pattern", ["\\", "^a\\", "a\\\\\\", "[a]\\"])
def test_a_backslash_at_the_end_escapes_nothing(pattern: str) -> None:
    assert ends_in_escape(pattern)
    assert pattern_problem(pattern) == ESCAPE


@pytest.mark.parametrize(
    ("pattern", "at"),
    [("*", 0), ("a**", 2), ("a*??", 3), ("a{2}{3}", 4), ("(+)", 1), ("a|?", 2), ("^*", 1), ("x$+", 2)],
)
def test_something_must_precede_a_count(pattern: str, at: int) -> None:
    assert pattern_problem(pattern) == f"the regular expression has nothing to repeat at {at}"


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        r"a\\\\",
        "^[a-z*+?]{2,6}$",
        "[]*+]+",
        "[^]*+]+?",
        r"[\]*]*",
        "[a[*+]b]+",
        "(?:a|b)*?",
        "(?P<n>a)+",
        "(?<n>a){2}",
        "(?i)a",
        "(a?)*",
        "a{2,}?",
        r"\*+",
        r"\d{3}-\d{4}",
        "a{b",
        "}",
        "]",
    ],
)
def test_what_is_right_has_no_problem(pattern: str) -> None:
    assert pattern_problem(pattern) is None


def test_what_python_reads_has_no_problem() -> None:
    random = Random(7)
    for _ in range(5_000):
        pattern = "".join(random.choice("ab\\()[]*+?^$|-{}1,d") for _ in range(random.randint(1, 7)))
        # Python repeats groups of anchors, has possessive counts, and reads classes in another way.
        if "[" in pattern or re.search(r"[+*?}]\+|[\^$][*?{+]|\{,", pattern):
            continue
        try:
            re.compile(pattern)
        except re.error:
            continue
        assert pattern_problem(pattern) is None, pattern
