"""Finds a model that is here, without a hub."""

from caravan_models.cache_folder import cache_folder
from caravan_models.cache_layout import RepositoryCache
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.fetched import FetchedModel, digest_of_parts
from caravan_models.gguf_header import read_architecture
from caravan_models.known import parse_reference
from caravan_models.listing import ModelFiles, choose
from caravan_models.local_file import local_model
from caravan_models.reference import HubModel, LocalFile, hub_model

# The architecture that a projector's file names, whatever the file is called.
_OF_PROJECTORS = "clip"


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
