"""What a line of the user is: words for the model, or a command with a slash."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args

from caravan.sampling_params import SamplingParams, StructuredOutputsParams
from caravan_proto.command_line import nearest

_QUOTES = '"""'

# Each command with its argument and its meaning, in the order of `/help`.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "retry": ("", "answer the last message again"),
    "fork": ("[NUMBER]", "continue in a copy of this conversation; with a number, go to that one"),
    "save": ("[FILE]", "write the conversation to a file"),
    "load": ("FILE", "continue the conversation in a file"),
    "set": ("[NAME VALUE]", "set a sampling parameter, such as temperature 0.2; the value off resets it"),
    "image": ("FILE", "send an image with the next message"),
    "system": ("[TEXT]", "set the system message; without a text, remove it"),
    "help": ("", "list the commands"),
    "bye": ("", "end"),
}
# Names of the same commands in other programs.
_SAME = {
    "exit": "bye",
    "quit": "bye",
    "q": "bye",
    "?": "help",
    "regenerate": "retry",
    "regen": "retry",
    "redo": "retry",
}
_NEEDED = frozenset({"load", "image"})


@dataclass(frozen=True, slots=True)
class Say:
    """Words for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command of COMMANDS, and what follows it."""

    name: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A command that cannot be carried out, and why."""

    why: str


Line = Say | Command | Wrong


def is_whole(text: str) -> bool:
    """Whether Enter sends ``text``: after three quotes the text goes on up to three more, and after a backslash."""
    if text.lstrip().startswith(_QUOTES):
        rest = text.lstrip().removeprefix(_QUOTES)
        return rest.rstrip().endswith(_QUOTES)
    return not text.endswith("\\")


def parse(text: str) -> Line | None:
    """Return what ``text`` is; None if it is blank. Two slashes begin words with one."""
    words = text.strip()
    if words.startswith(_QUOTES):
        words = words.removeprefix(_QUOTES).removesuffix(_QUOTES).strip()
        return Say(words) if words else None
    if not words:
        return None
    if words.startswith("//"):
        return Say(words[1:])
    if not words.startswith("/"):
        return Say(words.replace("\\\n", "\n"))
    word, _, argument = words[1:].partition(" ")
    name = _SAME.get(word.lower(), word.lower())
    if name not in COMMANDS:
        found = nearest(name, [*COMMANDS, *_SAME])
        hint = f"did you mean /{_SAME.get(found, found)}?" if found else "/help lists the commands"
        return Wrong(f"there is no command /{word}; {hint}")
    if name in _NEEDED and not argument.strip():
        return Wrong(f"/{name} needs {COMMANDS[name][0]}")
    return Command(name, argument.strip())


_KINDS: dict[str, Any] = {
    field.name: field.type
    for field in dataclasses.fields(SamplingParams)
    if field.name not in {"n", "best_of", "logprobs", "prompt_logprobs", "choice_parameters", "logits_processors"}
}


def changed(settings: Mapping[str, Any], argument: str) -> dict[str, Any] | str:
    """Return ``settings`` after `/set`, or why they cannot be changed so. ``argument``: a name and a value."""
    name, _, text = argument.replace("=", " ", 1).partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if name not in _KINDS:
        found = nearest(name, _KINDS)
        return f"there is no parameter {name}; {f'did you mean {found}?' if found else 'such as temperature and top_p'}"
    if not text:
        return f"/set {name} needs a value, such as {example(name)}; off resets it"
    rest = {key: value for key, value in settings.items() if key != name}
    if text == "off":
        return rest
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if set(get_args(_KINDS[name]) or (_KINDS[name],)) <= {int, float, NoneType} and not isinstance(value, float | int):
        return f"{name} must be a number, such as {example(name)}. Given: {text}"
    if name == "structured_outputs":
        try:
            StructuredOutputsParams(**value)
        except TypeError:
            return f'{name} must be a JSON object, such as {{"regex": "[a-z]+"}}. Given: {text}'
    return {**rest, name: value}


def example(name: str) -> Any:
    """Return a value that a parameter may have: its default, or 1."""
    default = getattr(SamplingParams(), name)
    return 1 if default is None else default


def help_text() -> str:
    """Return what `/help` prints."""
    lines = [f"  {f'/{name} {argument}':<22}{meaning}" for name, (argument, meaning) in COMMANDS.items()]
    keys = [
        ("Alt+Enter, Ctrl+J", "a new line; or write between two lines of " + _QUOTES),
        ("Ctrl+C", "end the answer, or drop what is typed"),
        ("Ctrl+D", "end"),
    ]
    return "\n".join([*lines, *(f"  {key:<22}{meaning}" for key, meaning in keys)])
