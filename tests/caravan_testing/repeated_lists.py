"""Prompts that the demo model continues with few near ties, so that a lost or repeated token shows."""

import random

WORDS = ("sun", "moon", "star", "sea", "tree", "house", "red", "blue", "one", "two", "king", "queen", "river", "road")


def repeated_list(number: int, words: int, chance: random.Random) -> str:
    """Return a list of random words, twice, and the beginning of a third time. ``number`` makes it unique."""
    listed = " ".join(chance.choices(WORDS, k=words))
    return f"{number} {listed}\n{number} {listed}\n{number}"
