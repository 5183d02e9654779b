"""Files of flags: TOML with a key for each long flag, such as ``ctx-size = 65536``."""

import argparse
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caravan_proto.command_line import Parser, nearest

_VARIABLE = "CARAVAN_CONFIG"
_SWITCHES = {True: "on", False: "off"}


@dataclass(frozen=True, slots=True)
class FileValues:
    """What a file says: the texts of each flag, as on a command line, by its name with underscores."""

    path: str = ""
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


NO_VALUES = FileValues()


def add_config_flag(parser: argparse._ActionsContainer) -> None:
    """Add ``--config``."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML file of flags by their long names, such as ctx-size = 65536; the command line and the environment "
        "override it",
    )


def read_config_file(parser: Parser, namespace: argparse.Namespace, environ: Mapping[str, str]) -> FileValues:
    """Return what the file of ``--config`` says, or end the program with one line if it is wrong. Blocks."""
    path: str = getattr(namespace, "config", "") or environ.get(_VARIABLE, "")
    if not path:
        return NO_VALUES
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        parser.error(f"cannot read --config {path}: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        parser.error(f"--config {path} must be TOML, such as port = 8080: {error}")
    texts: dict[str, tuple[str, ...]] = {}
    for key, value in found.items():
        name = _name_of(parser, path, key)
        if name in texts:
            parser.error(f"{path}: {key} is there twice")
        texts[name] = _texts_of(parser, f"{path}: {key}", value)
    return FileValues(path, texts)


def _name_of(parser: Parser, path: str, key: str) -> str:
    """Return the field of a key. Names of other programs count as on the command line."""
    flag = f"--{key.replace('_', '-')}"
    flag = parser.renamed(flag)
    known = parser.settable
    if flag not in known:
        found = nearest(flag, known).removeprefix("--")
        parser.error(
            f"{path}: unknown key {key}; {f'did you mean {found}?' if found else f'{parser.prog} --help lists all'}"
        )
    return known[flag]


def _texts_of(parser: Parser, where: str, value: Any) -> tuple[str, ...]:
    entries = value if isinstance(value, list) else [value]
    if not entries or not all(isinstance(entry, str | int | float) for entry in entries):
        parser.error(f"{where} must be a text, a number, true, false or a list of these")
    return tuple(_SWITCHES[entry] if isinstance(entry, bool) else str(entry) for entry in entries)
