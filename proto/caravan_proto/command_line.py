"""Parsers of command lines whose errors are one line: what is wrong, and the nearest thing that would be right."""

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

# Similarity from 0 to 1 above which a name counts as mistyped.
_SIMILAR = 0.6


@dataclass(frozen=True, slots=True)
class ForeignFlags:
    """Flags of other programs. ``renamed``: those that mean what a flag of ours means, by their names.

    ``answers``: what to do instead of the others, as a sentence that ends an error. ``prefixed``: flags with a value
    that counts as an argument with a prefix, such as a model's place on a hub.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)
    prefixed: Mapping[str, str] = field(default_factory=dict)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the one of ``names`` that ``name`` was probably meant to be, or ""."""
    found = difflib.get_close_matches(name, sorted(names), n=1, cutoff=_SIMILAR)
    return found[0] if found else ""


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, ends with status 2 and one line, and knows flags of other programs."""

    def __init__(self, *, foreign: ForeignFlags | None = None, **options: Any) -> None:
        self._foreign = foreign or ForeignFlags()
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """End the program with one line. See `argparse.ArgumentParser.error`."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    @property
    def flags(self) -> list[str]:
        """All names of flags."""
        return [name for action in self._actions for name in action.option_strings]

    @property
    def settable(self) -> dict[str, str]:
        """The fields of all long flags with a value, by flag."""
        return {
            name: action.dest
            for action in self._actions
            if action.nargs != 0
            for name in action.option_strings
            if name.startswith("--") and name != "--config"
        }

    def renamed(self, flag: str) -> str:
        """Return the flag of ours that ``flag`` of another program means, else itself."""
        return self._foreign.renamed.get(flag, flag)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `argparse.ArgumentParser.parse_args`."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self.refuse(rest)
        return found

    def parse_models(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse flags with arguments anywhere among them, where flags of other programs have our meaning."""
        found, rest = self.parse_known_intermixed_args(self._translated(words))
        if rest:
            self.refuse(rest)
        return found

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End the program because of the first of ``words`` that is a flag, or the first one if none is."""
        word = next((word for word in words if word.startswith("-")), words[0])
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        name = word.partition("=")[0]
        # A long flag is rarely meant to be a short one.
        long = [flag for flag in (*self.flags, *self._foreign.renamed) if flag.startswith("--")]
        found = nearest(name, long) if name.startswith("--") else nearest(name, self.flags)
        self.error(f"unknown flag {name}; {f'did you mean {found}?' if found else f'{self.prog} --help lists all'}")

    def _translated(self, words: Sequence[str]) -> list[str]:
        """Return the command line in our flags, or end the program with the answer to a flag that is not ours."""
        own, found = set(self.flags), list[str]()
        rest = iter(words)
        for word in rest:
            name, equals, value = word.partition("=")
            if name in own or not name.startswith("-"):
                found.append(word)
            elif name in self._foreign.renamed:
                found.append(f"{self._foreign.renamed[name]}{equals}{value}")
            elif name in self._foreign.prefixed:
                given = value if equals else next(rest, "")
                if not given or given.startswith("-"):
                    self.error(f"argument {name}: expected one argument")
                found.append(self._foreign.prefixed[name] + given.removeprefix(self._foreign.prefixed[name]))
            elif name in self._foreign.answers:
                self.error(f"unknown flag {name}: {self._foreign.answers[name]}")
            else:
                found.append(word)
        return found
