"""Conversations as lists of messages of tokens, and the ways in which clients go on with them, chosen at random."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random

Message = list[int]
Messages = list[Message]

_MOST_KEPT = 6
_SYSTEM_TOKENS, _QUESTION_TOKENS = (60, 120), (20, 90)


def tokens_of(messages: Sequence[Message]) -> list[int]:
    """Return the prompt that has these messages."""
    return list(chain.from_iterable(messages))


@dataclass
class Histories:
    """``words``: the tokens of messages. ``end``: the token that ends each of them. ``longest``: tokens of a prompt."""

    chance: Random
    words: range
    end: int
    longest: int
    kept: list[Messages] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._systems = [self._message(_SYSTEM_TOKENS) for _ in range(2)]

    def keep(self, prompt: Messages, answer: Sequence[int]) -> None:
        """Remember a conversation with its last answer, and forget one of many."""
        self.kept.append([*prompt, [*answer, self.end]])
        if len(self.kept) > _MOST_KEPT:
            del self.kept[self.chance.randrange(len(self.kept))]

    def new(self) -> Messages:
        """Return the prompt of a new conversation, as all following methods return prompts."""
        return [self.chance.choice(self._systems), self._question()]

    def next_turn(self) -> Messages:
        return [*self._some(), self._question()]

    def rewound(self) -> Messages:
        """Return one that goes back by some turns."""
        messages = self._some()
        return self._fitting([*messages[: 1 + 2 * self.chance.randrange(len(messages) // 2)], self._question()])

    def edited(self) -> Messages:
        """Return one with another message in place of one that is not the first."""
        messages = list(self._some())
        messages[self.chance.randrange(1, len(messages))] = self._question()
        return self._fitting([*messages, self._question()])

    def shifted(self) -> Messages:
        """Return one whose first turn after the system's message is left out."""
        messages = self._some()
        return [messages[0], *messages[3:], self._question()]

    def forks(self, count: int) -> list[Messages]:
        """Return so many that go on from the same place."""
        messages = self._some()
        return [[*messages, self._question()] for _ in range(count)]

    def any_of(self, count: int) -> list[Messages]:
        """Return so many of any kind."""
        kinds: list[Callable[[], Messages]] = [self.new, self.next_turn, self.next_turn, self.rewound, self.edited]
        return [self.chance.choice(kinds)() for _ in range(count)]

    def _some(self) -> Messages:
        """Return a conversation that has room for another turn."""
        fitting = [one for one in self.kept if len(tokens_of(one)) + _QUESTION_TOKENS[1] < self.longest]
        return self.chance.choice(fitting) if fitting else [*self.new()[:1], self._question(), self._question()]

    def _fitting(self, prompt: Messages) -> Messages:
        """Return ``prompt``, or one of a new conversation if it is too long."""
        return prompt if len(tokens_of(prompt)) <= self.longest else self.new()

    def _question(self) -> Message:
        return self._message(_QUESTION_TOKENS)

    def _message(self, bounds: tuple[int, int]) -> Message:
        return [*self.chance.choices(self.words, k=self.chance.randint(*bounds)), self.end]
