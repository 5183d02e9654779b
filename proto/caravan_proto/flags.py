"""Command lines from frozen dataclasses: each field is a flag and an environment variable.

    port: int = flag(3000, "TCP port to listen on", "-p", low=1, high=65535)

becomes ``--port``, ``-p`` and ``CARAVAN_PORT``. The command line wins over the environment, the environment over a
file of flags (see `caravan_proto.config_file`), and that over the default. Without the prefix, variables that shells
and container runtimes set, such as ``HOSTNAME``, would be read.
"""

import argparse
import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from caravan_proto import __version__
from caravan_proto.command_line import Parser
from caravan_proto.config_file import NO_VALUES, FileValues, add_config_flag, read_config_file

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    help: str
    aliases: tuple[str, ...]
    low: float
    high: float
    choices: tuple[str, ...]
    negation: str
    joined: bool
    secret: bool


def flag(
    default: Any,
    help: str,
    *aliases: str,
    low: float = -math.inf,
    high: float = math.inf,
    choices: Sequence[str] = (),
    negation: str = "",
    joined: bool = False,
    secret: bool = False,
) -> Any:
    """Return a dataclass field with a flag: its aliases, inclusive bounds of a number, allowed words of a text.

    ``negation``: a name that sets a switch to off. ``joined``: repeated texts are one, with commas between them.
    ``secret``: no output shows the value.
    """
    own = _Flag(
        help=help,
        aliases=aliases,
        low=low,
        high=high,
        choices=tuple(choices),
        negation=negation,
        joined=joined,
        secret=secret,
    )
    return dataclasses.field(default=default, metadata={"flag": own}, repr=not secret)


def _parser_of(kind: Any, meta: _Flag) -> Any:
    """Return a function that parses the value of a field of type ``kind``. It raises argparse's error on bad text."""

    def parse(text: str) -> Any:
        if kind is bool:
            if text.lower() in {"1", "true", "on", "yes"}:
                return True
            if text.lower() in {"0", "false", "off", "no"}:
                return False
            raise argparse.ArgumentTypeError(f"must be on or off. Given: {text!r}")
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {_KIND_NAMES[kind]}. Given: {text!r}") from None
        try:
            _check(value, meta)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return parse


def _check(value: Any, meta: _Flag) -> None:
    """Raise ValueError if the value of a flag that is no switch is not allowed."""
    if meta.choices and value not in meta.choices:
        raise ValueError(f"must be one of {', '.join(meta.choices)}. Given: {value!r}")
    if not isinstance(value, str) and not meta.low <= value <= meta.high:
        raise ValueError(f"must be >= {meta.low:g} and <= {meta.high:g}. Given: {value}")


_KIND_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


_SWITCHES = {True: "on", False: "off"}


def _metavar(kind: Any, name: str) -> str:
    """Return what stands for the value of a flag: a number, or the last word of its name."""
    if kind is bool:
        return "on,off"
    return name.rpartition("_")[2].upper() if kind is str else "N"


def _kind_of(annotation: Any) -> tuple[Any, bool]:
    """Return the scalar type of ``T``, ``T | None`` or ``tuple[T, ...]``, and whether the flag is repeatable."""
    if isinstance(annotation, types.UnionType):
        return next(arg for arg in typing.get_args(annotation) if arg is not type(None)), False
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def add_flags(
    parser: argparse._ActionsContainer, config: type[Any], fields: Sequence[dataclasses.Field[Any]] | None = None
) -> None:
    """Add the flags of the dataclass ``config``, or those of some of its ``fields``, to a parser or a group of one.

    The namespace has only the flags that were given.
    """
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config) if fields is None else fields:
        meta: _Flag = field.metadata["flag"]
        kind, repeats = _kind_of(hints[field.name])
        names = [f"--{field.name.replace('_', '-')}", *meta.aliases]
        default = _SWITCHES[field.default] if isinstance(field.default, bool) else field.default
        shown = "" if default in (None, (), "") else f" [{default}]"
        options: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool else {}
        parser.add_argument(
            *names,
            dest=field.name,
            help=f"{meta.help}{shown}".replace("%", "%%"),
            metavar="{" + ",".join(meta.choices) + "}" if meta.choices else _metavar(kind, field.name),
            type=_parser_of(kind, meta),
            default=argparse.SUPPRESS,
            action="append" if repeats or meta.joined else "store",
            **options,
        )
        if meta.negation:
            parser.add_argument(
                meta.negation,
                dest=field.name,
                help=f"{names[0]} off",
                action="store_const",
                const=False,
                default=argparse.SUPPRESS,
            )


def resolve(
    parser: argparse.ArgumentParser,
    config: type[Config],
    namespace: argparse.Namespace,
    environ: Mapping[str, str],
    file: FileValues = NO_VALUES,
) -> Config:
    """Return the config from flags, environment, ``file`` and defaults, or end the program with a usage error.

    A ValueError of the config's ``__post_init__`` is a usage error too.
    """
    try:
        return config(**given_values(parser, config, namespace, environ, file))
    except ValueError as error:
        parser.error(str(error))


def given_values(
    parser: argparse.ArgumentParser,
    config: type[Any],
    namespace: argparse.Namespace,
    environ: Mapping[str, str],
    file: FileValues = NO_VALUES,
) -> dict[str, Any]:
    """Return the values that flags, environment and ``file`` set, by field of ``config``, or end with a usage error.

    What has its default is left out.
    """
    hints = typing.get_type_hints(config)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        variable = f"CARAVAN_{field.name.upper()}"
        kind, repeats = _kind_of(hints[field.name])
        meta: _Flag = field.metadata["flag"]
        if hasattr(namespace, field.name):
            value = getattr(namespace, field.name)
            values[field.name] = tuple(value) if repeats else ",".join(value) if meta.joined else value
            continue
        if environ.get(variable):
            where, texts = f"environment variable {variable}", [environ[variable]]
            if repeats:
                texts = environ[variable].split(",")
        elif field.name in file.texts:
            where, texts = f"{file.path}: {field.name.replace('_', '-')}", list(file.texts[field.name])
        else:
            continue
        if len(texts) > 1 and not repeats:
            if not meta.joined:
                parser.error(f"{where} has one value. Given: {len(texts)}")
            texts = [",".join(texts)]
        try:
            parsed = [_parser_of(kind, meta)(text) for text in texts]
        except argparse.ArgumentTypeError as error:
            parser.error(f"{where}: {error}")
        values[field.name] = tuple(parsed) if repeats else parsed[0]
    return values


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_values(config: type[Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the values that the flags ``words`` set, by field of ``config``. Raises ValueError."""
    parser = _RaisingParser(add_help=False, allow_abbrev=False)
    add_flags(parser, config)
    return given_values(parser, config, parser.parse_args(words), {})


def default_of(config: type[Any], name: str) -> Any:
    """Return the default of a field of ``config``."""
    return next(field.default for field in dataclasses.fields(config) if field.name == name)


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Return the command line that sets ``values``, given by field."""
    return [
        f"--{name.replace('_', '-')}={entry}"
        for name, value in values.items()
        for entry in (value if isinstance(value, tuple) else (value,))
        if entry is not None
    ]


def from_values(config: type[Config], values: Mapping[str, Any]) -> Config:
    """Return the config with ``values`` of a Python program, by field, and defaults.

    Raises ValueError if a value is not allowed, and TypeError if it has the wrong type.
    """
    hints = typing.get_type_hints(config)
    checked: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast("Any", config)):
        if field.name not in values:
            continue
        value, (kind, repeats) = values[field.name], _kind_of(hints[field.name])
        entries = value = tuple(value) if repeats else value
        for entry in entries if repeats else [value]:
            if entry is None and field.default is None:
                continue
            if isinstance(entry, bool) != (kind is bool) or not isinstance(
                entry, (int, float) if kind is float else kind
            ):
                raise TypeError(f"{field.name} must be {_KIND_NAMES[kind]}. Given: {entry!r}")
            try:
                _check(entry, field.metadata["flag"])
            except ValueError as error:
                raise ValueError(f"{field.name} {error}") from None
        checked[field.name] = value
    return config(**checked)


def parser_of(config: type[Any], prog: str, description: str) -> Parser:
    """Return the parser of the command line of `load`."""
    parser = Parser(prog=prog, description=description)
    add_flags(parser, config)
    parser.add_argument(
        "--version", action="version", version=f"{prog} {__version__}", help="print the version and exit"
    )
    add_config_flag(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print the resulting configuration as JSON and exit"
    )
    return parser


def _shown(config: Any) -> dict[str, Any]:
    """Return the fields with their values, except secrets."""
    secrets = {field.name for field in dataclasses.fields(config) if field.metadata["flag"].secret}
    return {
        name: "***" if name in secrets and value is not None else value
        for name, value in dataclasses.asdict(config).items()
    }


def load(config: type[Config], *, prog: str, description: str, argv: Sequence[str] | None = None) -> Config:
    """Parse a whole command line into ``config``. With ``--print-config``, print it as JSON and end the program; with
    ``--version``, print the version.
    """
    parser = parser_of(config, prog, description)
    namespace = parser.parse_args(argv)
    resolved = resolve(parser, config, namespace, os.environ, read_config_file(parser, namespace, os.environ))
    if namespace.print_config:
        print(json.dumps(_shown(resolved), indent=2))  # noqa: T201
        parser.exit()
    return resolved
