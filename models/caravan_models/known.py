"""Looks names up in the file of known names, and reads what an operator wrote where a model is asked for."""

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path

from caravan_models.errors import FetchError, FetchProblem
from caravan_models.reference import FORM, HUB_PREFIX, KnownModel, LocalFile, Reference, parse_hub


@cache
def known_models() -> dict[str, KnownModel]:
    """Return the models with short names, by name."""
    rows: dict[str, str] = tomllib.loads(files("caravan_models").joinpath("known_models.toml").read_text())["models"]
    return {name: KnownModel(name, parse_hub(place)) for name, place in rows.items()}


def known_model(name: str) -> KnownModel | None:
    """Return the model with this short name. ``name`` may come from a request: it is only compared."""
    return known_models().get(name.lower().removesuffix(":latest"))


def parse_reference(text: str) -> Reference:
    """Return what ``text`` of an operator means. A file that is there wins over a name. Raises FetchError."""
    if text.startswith(HUB_PREFIX):
        return parse_hub(text.removeprefix(HUB_PREFIX))
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
