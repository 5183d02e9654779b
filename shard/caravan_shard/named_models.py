"""Replaces the names of models in a shard's flags by the paths of their files, which are downloaded where they lack."""

from collections.abc import Mapping
from dataclasses import replace

from caravan_models.cached_model import FetchedModel
from caravan_models.errors import FetchError
from caravan_models.fetching import fetch, fetch_blocking
from caravan_models.progress import note, shown
from caravan_models.reference import LocalFile, Named, parse_reference
from caravan_shard.config import ShardConfig
from caravan_shard.startup_error import StartupError

_FIELDS = ("model", "model_draft")


async def with_model_files(config: ShardConfig) -> ShardConfig:
    """Return the flags with paths for names. Raises StartupError. A cancelled call can be continued by the next one."""
    files = {}
    try:
        for field, named in _names(config).items():
            with shown(named.name) as on_progress:
                files[field] = await fetch(named, on_progress)
    except FetchError as error:
        raise StartupError(str(error)) from None
    return _with_files(config, files)


def with_model_files_blocking(config: ShardConfig) -> ShardConfig:
    """Return what `with_model_files` returns, for programs without an event loop. Raises StartupError."""
    files = {}
    try:
        for field, named in _names(config).items():
            with shown(named.name) as on_progress:
                files[field] = fetch_blocking(named, on_progress)
    except FetchError as error:
        raise StartupError(str(error)) from None
    return _with_files(config, files)


def _names(config: ShardConfig) -> dict[str, Named]:
    """Return the names that stand in fields for files. Raises FetchError for what is neither a name nor a file."""
    if config.backend == "fake":
        return {}
    given = {field: str(getattr(config, field)) for field in _FIELDS if getattr(config, field)}
    references = {field: parse_reference(text) for field, text in given.items()}
    return {field: found for field, found in references.items() if not isinstance(found, LocalFile)}


def _with_files(config: ShardConfig, files: Mapping[str, FetchedModel]) -> ShardConfig:
    for fetched in files.values():
        note(fetched)
    model, draft = files.get("model"), files.get("model_draft")
    if model is not None:
        # Clients find it under the name that it was asked for by.
        config = replace(config, model=str(model.model), alias=config.alias or model.name)
    if draft is not None:
        config = replace(config, model_draft=str(draft.model))
    return config
