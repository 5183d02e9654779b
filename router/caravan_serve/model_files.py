"""Finds the models of `caravan serve`, and gets those with names, once for all shards."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from caravan_models.fetching import fetch
from caravan_models.known import parse_reference
from caravan_models.reference import LocalFile
from caravan_models.report import note, shown

_DRAFT = ("-md", "--model-draft")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that is here. ``name``: under which clients find it; ``named``: it was asked for by that name."""

    path: str
    name: str
    named: bool = False


async def model_files(texts: Sequence[str]) -> list[ModelFile]:
    """Return the models that ``texts`` of an operator mean, once their files are here. Raises FetchError."""
    references = {text: parse_reference(text) for text in texts}
    found = []
    for text in texts:
        reference = references[text]
        if isinstance(reference, LocalFile):
            found.append(local_file(text))
            continue
        with shown(reference.name) as on_progress:
            fetched = await fetch(reference, on_progress)
        note(fetched)
        found.append(ModelFile(str(fetched.model), fetched.name, named=True))
    return found


def local_file(text: str) -> ModelFile:
    """Return a model that is a file, or that the toy backend makes of its name."""
    return ModelFile(text, Path(text).name)


async def with_draft_file(flags: Sequence[str]) -> list[str]:
    """Return the flags of the shards with the path of the draft model in place of its name. Raises FetchError."""
    changed = list(flags)
    for number, given in enumerate(flags):
        flag, _, value = given.partition("=")
        if flag in _DRAFT and given != flag:
            [model] = await model_files([value])
            changed[number] = f"{flag}={model.path}"
        elif given in _DRAFT and number + 1 < len(flags):
            [model] = await model_files([flags[number + 1]])
            changed[number + 1] = model.path
    return changed


def uses_toy(flags: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the shards run the toy model, whose names are no files."""
    toy = ("--backend", "fake")
    given = {"--backend=fake"} & set(flags) or toy in itertools.pairwise(flags)
    return bool(given) or environment.get("CARAVAN_BACKEND") == "fake"
