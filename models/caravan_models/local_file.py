"""A model in a file of this machine, with its other parts and its projector beside it."""

from pathlib import Path

from caravan_models.errors import FetchError, FetchProblem
from caravan_models.fetched import FetchedModel
from caravan_models.listing import RepositoryFile, choose, is_model, part_names, title_of
from caravan_models.reference import HubModel, NamedFile


def local_model(path: Path) -> FetchedModel:
    """Return the model that the file is, or is a part of. Its digest is unknown. Raises FetchError, OSError."""
    size = path.stat().st_size
    folder = path.parent
    files = [RepositoryFile(one.name, one.stat().st_size, "") for one in folder.glob("*.gguf") if one.is_file()]
    if path.name not in {file.path for file in files}:
        return FetchedModel(name=path.name, model=path, parts=(path,), size=size, digest="")
    missing = [name for name in part_names(path.name) if name not in {file.path for file in files}]
    if missing:
        raise FetchError(
            FetchProblem.MISSING_PARTS,
            f"{path.name} is a part of a model, and {folder} lacks {missing[0]}; put all parts into one folder",
        )
    found = choose(HubModel(str(folder), NamedFile(path.name)), files)
    parts = tuple(folder / part.path for part in found.parts)
    return FetchedModel(
        name=path.name,
        model=parts[0],
        parts=parts,
        projector=None if found.projector is None else folder / found.projector.path,
        size=sum(file.size for file in found.all),
        digest="",
    )


def local_projector(path: Path) -> Path | None:
    """Return the projector beside a model; None without one. Raises OSError.

    Beside files of other models, it must have the name of the model, but for its quantisation, in its own name.
    """
    names = [one.name for one in path.parent.glob("*.gguf") if one.is_file()]
    title = title_of(path.name).lower()
    if any(is_model(name) and title_of(name).lower() != title for name in names):
        names = [name for name in names if title in name.lower()]
    files = [RepositoryFile(name, 0, "") for name in names]
    try:
        found = choose(HubModel(str(path.parent), NamedFile(path.name)), files).projector
    except FetchError:
        # Whoever opens the model says what is wrong with its file.
        return None
    return None if found is None else path.parent / found.path


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the files of the model that llama.cpp loads from ``path``: those of its parts that are there."""
    parts = (path.with_name(name) for name in part_names(path.name))
    return tuple(part for part in parts if part == path or part.is_file())
