"""What an operator may write where a model is asked for: a name, a place on a hub, or the path of a file.

A name that comes from a request is not for this module: `known.known_model` looks it up, and makes neither a path nor a
URL of it.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import assert_never

from caravan_models.errors import FetchError, FetchProblem

HUB_PREFIX = "hf:"
# As Ollama and browsers write it.
_HOSTS = re.compile(r"(?:https://)?(?:www\.)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
FORM = "hf:OWNER/REPOSITORY[:QUANTISATION or FILE.gguf][@REVISION]"
DEFAULT_REVISION = "main"
# As hubs allow them: no "..", no "--", no "." or "-" at an end.
_PART = r"(?!.*(?:\.\.|--))[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"(?=.{{3,96}}$){_PART}/{_PART}", re.ASCII)
_QUANTISATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", re.ASCII)
_FILE = re.compile(r"[\w][\w .+@()=,-]*(?:/[\w][\w .+@()=,-]*)*\.gguf", re.ASCII | re.IGNORECASE)
_REVISION = re.compile(r"(?!.*(?:\.\.|//|@\{))[A-Za-z0-9_][A-Za-z0-9._/+-]{0,199}", re.ASCII)


DEFAULT_QUANTISATION = "Q4_K_M"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The model of a repository that is quantised so, such as Q4_K_M, in upper case."""

    name: str


@dataclass(frozen=True, slots=True)
class NamedFile:
    """The model of a repository that is in this file, or whose parts this file is one of."""

    path: str


# None: the only model of a repository, or the one in DEFAULT_QUANTISATION.
Choice = Quantisation | NamedFile | None


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of a hub's repository. ``revision``: a branch, a tag or a commit."""

    repository: str
    choice: Choice = None
    revision: str = DEFAULT_REVISION

    @property
    def name(self) -> str:
        """The name under which clients find it, without the prefix; `parse_hub` reads it again."""
        match self.choice:
            case None:
                chosen = ""
            case Quantisation(name):
                chosen = f":{name}"
            case NamedFile(path):
                chosen = f":{path}"
            case _:
                assert_never(self.choice)
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repository}{chosen}{revision}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name, from the file of known names."""

    name: str
    source: HubModel


Named = HubModel | KnownModel


Reference = LocalFile | Named


def hub_model(named: Named) -> HubModel:
    """Return where the model is."""
    return named.source if isinstance(named, KnownModel) else named


def parse_hub(text: str) -> HubModel:
    """Parse what follows ``hf:``. Raises FetchError."""
    # A file's name may have an "@" in it, a revision has none.
    rest, at, revision = text.rpartition("@")
    if not at or revision.lower().endswith(".gguf"):
        rest, revision = text, DEFAULT_REVISION
    repository, _, chosen = rest.partition(":")
    if not _REPOSITORY.fullmatch(repository):
        raise _bad(text, "OWNER/REPOSITORY is missing or has characters that no hub allows")
    if not _REVISION.fullmatch(revision):
        raise _bad(text, f"{revision!r} is no branch, tag or commit")
    return HubModel(repository, _choice(text, rest, chosen), revision)


def _choice(text: str, rest: str, chosen: str) -> Choice:
    if ":" not in rest:
        return None
    if _FILE.fullmatch(chosen):
        return NamedFile(chosen)
    if _QUANTISATION.fullmatch(chosen):
        return Quantisation(chosen.upper())
    raise _bad(text, f"{chosen!r} is neither a quantisation such as Q4_K_M nor a path to a .gguf file")


def _bad(text: str, why: str) -> FetchError:
    return FetchError(FetchProblem.BAD_REFERENCE, f"{HUB_PREFIX}{text}: {why}; pass {FORM}")


@cache
def known_models() -> dict[str, KnownModel]:
    """Return the models with short names, by name."""
    rows: dict[str, str] = tomllib.loads(files("caravan_models").joinpath("known_models.toml").read_text())["models"]
    return {name: KnownModel(name, parse_hub(place)) for name, place in rows.items()}


def known_model(name: str) -> KnownModel | None:
    """Return the model with this short name. ``name`` may come from a request: it is only compared."""
    return known_models().get(name.lower().removesuffix(":latest"))


def hub_place(text: str) -> str | None:
    """Return what `parse_hub` reads if ``text`` begins with ``hf:`` or with the host of the hub; else None."""
    if text.startswith(HUB_PREFIX):
        return text.removeprefix(HUB_PREFIX)
    host = _HOSTS.match(text)
    return None if host is None else text[host.end() :].rstrip("/")


def parse_reference(text: str) -> Reference:
    """Return what ``text`` of an operator means. A file that is there wins over a name. Raises FetchError."""
    place = hub_place(text)
    if place is not None:
        return parse_hub(place)
    path = Path(text)
    if path.is_file():
        return LocalFile(path)
    known = known_model(text)
    if known is not None:
        return known
    if path.suffix.lower() == ".gguf" or path.exists():
        return LocalFile(path)
    raise FetchError(FetchProblem.UNKNOWN_NAME, f"{text}: there is no such file, and {_hint(text)}")


def _hint(text: str) -> str:
    try:
        place = parse_hub(text)
    except FetchError:
        names = ", ".join(sorted(known_models()))
        return f"no such name; pass the path of a GGUF file, {FORM}, or one of {names}"
    return f"no such name; for the repository of a hub pass {HUB_PREFIX}{place.name}"
