"""Which models there are: a TOML file, a folder of GGUF files, or the hub's cache.

[[models]]
name = "writer"
model = "SmolLM2-135M-Instruct.Q4_1.gguf"
aliases = ["gpt-4o-mini"]
flags = ["--ctx-size", "4096"]
pinned = true
memory_mib = 400
idle_s = 300
"""

import hashlib
import logging
import math
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from caravan_models.errors import FetchError
from caravan_models.reference import LocalFile, parse_reference
from caravan_proto.flags import parse_values
from caravan_serve.model_folder import models_in, title_of
from caravan_serve.shard_flags import ShardValues
from caravan_shard.config import ShardConfig

_log = logging.getLogger(__name__)
# A name is never a path: it may have one slash, as those of repositories.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]*(/[A-Za-z0-9][A-Za-z0-9._:+-]*)?")
_MAX_NAME = 200
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:+-]+")
# Of what tells files apart whose names differ only in what a name cannot have.
_TAG_DIGITS = 8
_MAX_TITLE = _MAX_NAME - _TAG_DIGITS - 1
# Flags that the server itself passes to each shard, by field.
_OWN_FLAGS = ("model", "alias", "address", "shard_id", "backend", "exit_with_parent", "ready_fd")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """How a model is loaded.

    ``source``: a GGUF file, or a repository as `caravan serve` takes it. ``flags``: of its shards, beside those of the
    command. ``pinned``: loaded at the start, and unloaded only if an operator asks. ``memory_bytes``: what it takes, if
    the estimate is not to be used. ``idle_s``: seconds without requests after which it is unloaded.
    ``is_pulled``: it is of the hub's cache, and goes when it is removed there.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    flags: ShardValues = field(default_factory=dict)
    pinned: bool = False
    memory_bytes: int | None = None
    idle_s: float = math.inf
    is_pulled: bool = False


class CatalogueFileError(ValueError):
    """The models cannot be read, or contradict each other."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    model: str
    aliases: list[str] = []
    flags: list[str] = []
    pinned: bool = False
    memory_mib: int | None = None
    idle_s: float | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: list[_Entry]


def read_catalogue(file: Path | None, folder: Path | None) -> tuple[CatalogueEntry, ...]:
    """Return the models of ``file``, then those of ``folder`` that ``file`` does not name. Blocks.

    Raises CatalogueFileError, which names the file and the problem.
    """
    entries = () if file is None else _read_file(file)
    if folder is not None:
        known = {name for entry in entries for name in (entry.name, *entry.aliases)}
        sources = {Path(entry.source) for entry in entries}
        found = _read_folder(folder)
        entries += tuple(one for one in found if one.name not in known and Path(one.source) not in sources)
    return entries


def check_name(where: str, name: str) -> None:
    """Raise CatalogueFileError unless ``name`` can be the name of a model."""
    if not _can_be_name(name):
        rule = f"must have 1 to {_MAX_NAME} letters of ASCII, digits or ._:+- and at most one /"
        raise CatalogueFileError(f"{where} {rule}. Given: {name!r:.80}")


def _can_be_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and len(name) <= _MAX_NAME and ".." not in name


def _read_file(path: Path) -> tuple[CatalogueEntry, ...]:
    try:
        return parse_catalogue(path.read_text(encoding="utf-8"), path.parent)
    except OSError as error:
        raise CatalogueFileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CatalogueFileError(f"{path}: not UTF-8") from error
    except CatalogueFileError as error:
        raise CatalogueFileError(f"{path}: {error}") from error


def parse_catalogue(text: str, folder: Path) -> tuple[CatalogueEntry, ...]:
    """Return the models of a TOML text, whose relative paths begin at ``folder``. Raises CatalogueFileError."""
    try:
        entries = msgspec.convert(tomllib.loads(text), _File).models
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise CatalogueFileError(str(error)) from error
    checked = tuple(_checked(f"models[{index}]", entry, folder) for index, entry in enumerate(entries))
    check_distinct(checked)
    return checked


def check_distinct(entries: Iterable[CatalogueEntry]) -> None:
    """Raise CatalogueFileError if two models answer to one name."""
    owner: dict[str, str] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            if name in owner:
                raise CatalogueFileError(f"the models {owner[name]} and {entry.name} both answer to {name}")
            owner[name] = entry.name


def _checked(where: str, entry: _Entry, folder: Path) -> CatalogueEntry:
    check_name(f"{where}.name", entry.name)
    for index, alias in enumerate(entry.aliases):
        check_name(f"{where}.aliases[{index}]", alias)
    if not entry.model:
        raise CatalogueFileError(f"{where}.model must be a GGUF file or a repository. Given: ''")
    try:
        flags = parse_values(ShardConfig, entry.flags)
    except ValueError as error:
        raise CatalogueFileError(f"{where}.flags: {error}") from error
    for name in _OWN_FLAGS:
        if name in flags:
            given = name.replace("_", "-")
            raise CatalogueFileError(f"{where}.flags must not have --{given}, which the server itself sets")
    if entry.memory_mib is not None and entry.memory_mib < 0:
        raise CatalogueFileError(f"{where}.memory_mib must be >= 0. Given: {entry.memory_mib}")
    if entry.idle_s is not None and not entry.idle_s >= 0:
        raise CatalogueFileError(f"{where}.idle_s must be >= 0, or left out for no limit. Given: {entry.idle_s}")
    try:
        reference = parse_reference(entry.model)
    except FetchError as error:
        raise CatalogueFileError(f"{where}.model: {error}") from error
    return CatalogueEntry(
        name=entry.name,
        source=str(folder / reference.path.expanduser()) if isinstance(reference, LocalFile) else entry.model,
        aliases=tuple(entry.aliases),
        flags=flags,
        pinned=entry.pinned,
        memory_bytes=None if entry.memory_mib is None else entry.memory_mib << 20,
        idle_s=math.inf if entry.idle_s is None else entry.idle_s,
    )


def _read_folder(folder: Path) -> tuple[CatalogueEntry, ...]:
    """Return a model for each file that is one. One that cannot be a model is named in the log."""
    try:
        files = models_in(folder)
    except OSError as error:
        raise CatalogueFileError(f"{folder}: {error.strerror}") from error
    named: dict[str, Path] = {}
    # First those whose names need no change, so that no other takes their names.
    for file in sorted(files, key=lambda file: not _can_be_name(title_of(file))):
        if not file.is_file():
            reason = "a link to nothing" if file.is_symlink() and not file.exists() else "no file"
            _log.warning("%r of --models-dir is left out: it is %s", file.name, reason)
            continue
        name = name_of(title_of(file))
        if name in named:
            name = _distinct(name, file.name)
        if name != title_of(file):
            _log.warning("%r of --models-dir is called %s", file.name, name)
        named[name] = file
    return tuple(
        CatalogueEntry(
            name=name,
            source=str(file),
            aliases=(file.name,) if _can_be_name(file.name) and file.name not in named else (),
        )
        for name, file in sorted(named.items())
    )


def name_of(title: str) -> str:
    """Return the name of a model whose file has this name without its suffix: the same, if that can be one."""
    if _can_be_name(title):
        return title
    plain = _NOT_IN_NAMES.sub("-", title).strip("._:+-")
    while ".." in plain:
        plain = plain.replace("..", ".")
    return plain if plain and len(plain) <= _MAX_NAME else _distinct(plain[:_MAX_TITLE] or "model", title)


def _distinct(name: str, file: str) -> str:
    """Return a name that files of other names have not, and this one has after each start."""
    return f"{name[:_MAX_TITLE]}-{hashlib.sha256(os.fsencode(file)).hexdigest()[:_TAG_DIGITS]}"


def names_of(entries: Sequence[CatalogueEntry]) -> dict[str, str]:
    """Return the name of the model that each alias means."""
    return {alias: entry.name for entry in entries for alias in entry.aliases}
