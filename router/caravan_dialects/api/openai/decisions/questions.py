"""The words in which a model is asked a question, and the labels that it may answer with.

Whoever changes a word that a model reads raises `PROMPT_FORMAT_VERSION`: probabilities of different versions cannot be
compared.
"""

import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.messages import check_depth
from caravan_dialects.api.openai.decisions.rules import blank_error, option_count_error, same_choice_error
from caravan_dialects.api.openai.decisions.schema import (
    ChoiceQuestion,
    DecisionLevel,
    DecisionOption,
    Instructions,
    PredicateQuestion,
    Question,
    ScoreQuestion,
)
from caravan_dialects.api.openai.rules import missing_field_error

PROMPT_FORMAT_VERSION = 1
MAX_QUESTIONS = 400
MIN_OPTIONS, MAX_OPTIONS = 2, 255

_YES_NO = ("Yes", "No")
_TEXTS = {True: "true", False: "false"}
_LETTERS = tuple(string.ascii_uppercase)
# All of one length, so that none is the beginning of another.
_PAIRS = tuple("".join(pair) for pair in product(string.ascii_uppercase, repeat=2))


@dataclass(frozen=True, slots=True)
class Wording:
    """A question as the model reads it after the input. ``labels``: what it may answer, in the order of the options."""

    text: str
    labels: tuple[str, ...]


def worded(field: str, question: Question, *, backwards: bool = False) -> Wording:
    """Return the words of a question; ``backwards``: with its options in the other order. Raises ValidationError.

    ``field``: what the client calls the question.
    """
    asked = _instructions(f"{field}.instructions", question.instructions)
    match question:
        case PredicateQuestion():
            first, second = reversed(_YES_NO) if backwards else _YES_NO
            text = f"Is the following true of the input above?\n{asked}\n\nAnswer with one word: {first} or {second}."
            return Wording(text, _YES_NO)
        case ChoiceQuestion(choices=choices):
            _check_count(f"{field}.choices", choices)
            _check_different(field, choices)
            # Only beside a boolean of the same text is a string quoted.
            booleans = {_TEXTS[option.value] for option in choices if isinstance(option.value, bool)}
            lines = [_line(_shown(option.value, booleans), option.description) for option in choices]
            return _listed("Which option fits the input above?", asked, lines, backwards=backwards)
        case ScoreQuestion(levels=levels):
            _check_count(f"{field}.levels", levels)
            for number, level in enumerate(levels):
                if not level.label.strip():
                    raise blank_error(f"{field}.levels[{number}].label")
            lines = [_line(level.label, level.description) for level in levels]
            return _listed("Which level fits the input above?", asked, lines, backwards=backwards)


def _listed(kind: str, asked: str, lines: Sequence[str], *, backwards: bool) -> Wording:
    labels = (_LETTERS if len(lines) <= len(_LETTERS) else _PAIRS)[: len(lines)]
    # Labels follow the order in which the options are listed, so that the place alone changes.
    order = range(len(lines))[::-1] if backwards else range(len(lines))
    listed = "\n".join(f"{label}. {lines[place]}" for label, place in zip(labels, order, strict=True))
    length = "letter" if len(labels[0]) == 1 else "two letters"
    text = f"{kind}\n{asked}\n\n{listed}\n\nAnswer with the {length} of one of them."
    return Wording(text, labels[::-1] if backwards else labels)


def _shown(value: str | bool, booleans: Collection[str]) -> str:
    if isinstance(value, bool):
        return _TEXTS[value]
    return f'"{value}"' if value in booleans else value


def _line(name: str, description: str | None) -> str:
    return f"{name}: {description}" if description else name


def _check_count(field: str, options: Sequence[DecisionOption] | Sequence[DecisionLevel]) -> None:
    if not MIN_OPTIONS <= len(options) <= MAX_OPTIONS:
        raise option_count_error(field, MIN_OPTIONS, MAX_OPTIONS, len(options))


def _check_different(field: str, choices: Sequence[DecisionOption]) -> None:
    seen: set[tuple[bool, str | bool]] = set()
    for number, option in enumerate(choices):
        key = isinstance(option.value, bool), option.value
        if key in seen:
            raise same_choice_error(f"{field}.choices[{number}].value", option.value)
        if option.value == "":
            raise blank_error(f"{field}.choices[{number}].value")
        seen.add(key)


def _instructions(field: str, given: Instructions) -> str:
    if isinstance(given, str):
        text = given
    else:
        text = "\n".join(_text(f"{field}[{number}]", part) for number, part in enumerate(given))
    if not text.strip():
        raise blank_error(field)
    return text.strip()


def _text(field: str, part: dict[str, Any]) -> str:
    match part.get("type"):
        case "input_text":
            if not isinstance(text := part.get("text"), str):
                raise missing_field_error(f"{field}.text")
            return text
        case "input_json":
            return json_text(field, part)
        case kind:
            raise unsupported_field_error(f"{field}.type", "send `input_text` or `input_json`", kind)


def json_text(field: str, part: dict[str, Any]) -> str:
    """Return the text of a part of type ``input_json``. Raises ValidationError."""
    data = part.get("data")
    if not isinstance(data, dict | list):
        raise missing_field_error(f"{field}.data")
    check_depth(f"{field}.data", data)
    return msgspec.json.encode(data).decode()
