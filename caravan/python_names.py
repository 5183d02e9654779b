"""Messages of router and shard in the names of this package: options of Python in place of flags of commands."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, get_type_hints

from caravan.options import ModelOptions, ServerOptions
from caravan_router.config import RouterConfig
from caravan_shard.config import ShardConfig

# A flag that stands alone, and the value after it.
_FLAG = re.compile(r"(?<![\w/-])(--?[a-z][\w-]*)(?:(?: |=)(on|off|\d+(?:\.\d+)?)\b)?")
# What programs on several hosts are told, by what is so in one process.
_PHRASES = {
    "shards that were started with": "a model that was opened with",
    "see --log-level debug": 'see logging.getLogger("caravan_shard") at level DEBUG',
}
_SWITCHES = {"on": True, "off": False}


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    """``alone``: what its flag without a value stands for; None if the flag needs one."""

    name: str
    alone: bool | None
    is_text: bool


@cache
def _options() -> Mapping[str, _Option]:
    """Return the options by their flags."""
    found: dict[str, _Option] = {"-m": _Option("model", None, True), "--model": _Option("model", None, True)}
    for config, options in ((RouterConfig, ServerOptions), (RouterConfig, ModelOptions), (ShardConfig, ModelOptions)):
        hints = get_type_hints(options)
        for field in dataclasses.fields(config):
            if field.name not in hints:
                continue
            kind, meta = hints[field.name], field.metadata["flag"]
            option = _Option(field.name, True if kind is bool else None, kind is str)
            for flag in (f"--{field.name.replace('_', '-')}", *meta.aliases):
                found[flag] = option
            if meta.negation:
                found[meta.negation] = _Option(field.name, False, is_text=False)
    return found


@cache
def _hyphenated() -> re.Pattern[str]:
    names = {option.name.replace("_", "-") for option in _options().values() if "_" in option.name}
    return re.compile(rf"(?<![\w-])({'|'.join(sorted(names, key=len, reverse=True))})(?![\w-])")


def in_python(message: str) -> str:
    """Return ``message`` with options of this package where it names flags. Other flags stay."""
    for phrase, ours in _PHRASES.items():
        message = message.replace(phrase, ours)
    message = _FLAG.sub(_renamed, message)
    return _hyphenated().sub(lambda found: found[1].replace("-", "_"), message)


def _renamed(found: re.Match[str]) -> str:
    flag, value = found.groups()
    option = _options().get(flag)
    if option is None:
        return found[0]
    if value is None:
        return option.name if option.alone is None else f"{option.name}={option.alone}"
    shown: Any = value
    if option.is_text:
        shown = repr(value)
    elif value in _SWITCHES:
        shown = _SWITCHES[value]
    return f"{option.name}={shown}"


@contextmanager
def python_names() -> Iterator[None]:
    """Let the errors of options use the names of this package. Raises TypeError, ValueError."""
    try:
        yield
    except TypeError as error:
        raise TypeError(in_python(str(error))) from None
    except ValueError as error:
        raise ValueError(in_python(str(error))) from None
