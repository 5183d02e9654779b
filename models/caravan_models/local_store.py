"""What the cache holds of models, and how some of it is removed."""

from dataclasses import dataclass
from pathlib import Path

from caravan_models.cache_layout import RepositoryCache, repositories
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.listing import ModelFiles, choose_to_remove, models_in
from caravan_models.reference import DEFAULT_REVISION, HubModel

_SHOWN_OF_COMMIT = 12


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the cache. ``name``: what to call it after ``hf:``. ``modified_s``: in seconds since 1970."""

    name: str
    quantisation: str
    size: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What has come of downloads that have not ended."""

    repository: str
    size: int


def stored_models(cache: Path) -> list[StoredModel]:
    """Return the whole models of the cache, by name. Raises OSError."""
    found = []
    for repository in repositories(cache):
        revisions = {commit: revision for revision, commit in repository.refs().items()}
        for commit in repository.commits():
            # Newer commits have taken the place of one that no branch or tag leads to.
            revision = revisions.get(commit, commit[:_SHOWN_OF_COMMIT])
            suffix = "" if revision == DEFAULT_REVISION else f"@{revision}"
            for label, quantisation, files in models_in(repository.files(commit)):
                paths = [repository.snapshot(commit, part.path) for part in files.parts]
                found.append(
                    StoredModel(
                        name=f"{repository.repository}:{label}{suffix}",
                        quantisation=quantisation,
                        size=sum(file.size for file in files.all),
                        modified_s=max(path.stat().st_mtime for path in paths),
                    )
                )
    return sorted(found, key=lambda model: model.name.lower())


def unfinished(cache: Path) -> list[Unfinished]:
    """Return the repositories of which files are not whole. Raises OSError."""
    sizes = {one.repository: sum(path.stat().st_size for path in one.partials()) for one in repositories(cache)}
    return [Unfinished(repository, size) for repository, size in sizes.items() if size]


def remove(reference: HubModel, cache: Path) -> int:
    """Remove a model, and what has come of unfinished downloads of its repository; return the bytes that are free then.

    Without a revision, it goes from all commits. Files that other models need stay. Raises FetchError, OSError.
    """
    repository = RepositoryCache(cache, reference.repository)
    commits = repository.commits()
    if reference.revision != DEFAULT_REVISION:
        commits = [commit for commit in commits if commit == repository.commit_of(reference.revision)]
    found = {commit: files for commit in commits if (files := _chosen(reference, repository, commit)) is not None}
    partials = repository.partials()
    if not found and not partials:
        raise FetchError(
            FetchProblem.NOT_CACHED, f"the cache {cache} has no {reference.name}; `caravan list` names what it has"
        )
    if any(map(repository.is_being_downloaded, partials)):
        raise FetchError(
            FetchProblem.BUSY, f"{reference.repository} is being downloaded; end that first, or wait until it is here"
        )
    freed = sum(path.stat().st_size for path in partials)
    for path in partials:
        path.unlink()
    for commit, files in found.items():
        for file in files.all:
            pointer = repository.snapshot(commit, file.path)
            # A copy, where the file system has no links.
            freed += 0 if pointer.is_symlink() else file.size
            pointer.unlink()
    return freed + repository.remove_unused()


def _chosen(reference: HubModel, repository: RepositoryCache, commit: str) -> ModelFiles | None:
    """Return the model's files of one commit, None if it has none of it. Raises FetchError if it can be several."""
    try:
        return choose_to_remove(reference, repository.files(commit))
    except FetchError as error:
        if error.problem is FetchProblem.AMBIGUOUS:
            raise
        return None
