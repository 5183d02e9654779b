"""The flags of the shards that `caravan serve` starts: what was given, by field of `ShardConfig`, and what is added."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from caravan_models.cached_model import parts_of
from caravan_models.fetching import fetch
from caravan_models.progress import note, shown
from caravan_models.reference import LocalFile, parse_reference
from caravan_proto.config_file import FileValues
from caravan_proto.flags import default_of, from_values, given_values
from caravan_proto.host_memory import available_memory
from caravan_proto.limits import MOST_ROLLBACK_TOKENS
from caravan_serve.model_folder import models_in
from caravan_shard.config import ShardConfig

# Values by field of `ShardConfig`; what is left out has its default.
ShardValues: TypeAlias = Mapping[str, Any]

# What --speculate is with a draft model, if it is not given.
_DRAFT_TOKENS = 8
# What belongs to one model, and by which flag it is given.
_OF_ONE_MODEL = {
    "lora": "an adapter",
    "mmproj": "a projector",
    "alias": "an alias",
    "model_draft": "a draft model",
}
# What the router has too, and shards are given as it is there.
SET_BY_ROUTER = ("log_level", "json_output", "log_file")
# What `ShardProcess` itself sets for each shard.
SET_BY_SERVE = ("address", "shard_id", "exit_with_parent", "ready_fd")


class ServeError(ValueError):
    """The models, or the flags of the shards, do not go together."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that is here. ``name``: under which clients find it; ``named``: it was asked for by that name."""

    path: str
    name: str
    named: bool = False


def shard_values(
    parser: argparse.ArgumentParser, namespace: argparse.Namespace, environ: Mapping[str, str], file: FileValues
) -> tuple[list[str], dict[str, Any]]:
    """Return the models that ``namespace`` names, and what it, ``environ`` and ``file`` say of all shards.

    Ends the program with a usage error if they are wrong.
    """
    values = given_values(parser, ShardConfig, namespace, environ, file)
    given = {name: value for name, value in values.items() if name not in SET_BY_SERVE}
    of_environment = given.pop("model", "")
    models = [*namespace.words, *(namespace.models or ())]
    return models or ([of_environment] if of_environment else list(file.texts.get("models", ()))), given


def combined(*parts: ShardValues) -> dict[str, Any]:
    """Return the values of all ``parts``. The last one wins, but what repeatable flags give adds up."""
    values: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            values[name] = (*values.get(name, ()), *value) if isinstance(value, tuple) else value
    return values


def checked(values: ShardValues) -> ShardValues:
    """Return the flags of a shard if they do not contradict each other. Raises ServeError."""
    try:
        from_values(ShardConfig, values)
    except ValueError as error:
        raise ServeError(str(error)) from None
    return values


def is_toy(given: ShardValues) -> bool:
    """Whether the shards run the toy model, whose names are no files."""
    return bool(given.get("backend") == "fake")


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
    """Return a model that is a file, or the only one of a folder, or that the toy backend makes of its name.

    Raises ServeError for a folder without a model, or with several.
    """
    path = Path(text)
    if path.is_dir():
        try:
            models = models_in(path)
        except OSError as error:
            raise ServeError(f"cannot read {text}: {error.strerror or error}") from error
        if len(models) != 1:
            found = f"the models {', '.join(file.name for file in models)}" if models else "no GGUF file"
            raise ServeError(f"{text} has {found}: name a file, or serve a folder's models with --models-dir {text}")
        [path] = models
    return ModelFile(str(path), path.name)


async def with_draft_file(given: ShardValues) -> ShardValues:
    """Return the flags of the shards with the path of the draft model in place of its name. Raises FetchError."""
    if not given.get("model_draft"):
        return given
    [draft] = await model_files([given["model_draft"]])
    return {**given, "model_draft": draft.path}


def check_models(models: Sequence[ModelFile], given: ShardValues) -> None:
    """Require that several models can be told apart, and that ``given`` suits all of them. Raises ServeError."""
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise ServeError(f"each model needs its own name. Given: {', '.join(model.path for model in models)}")
    for field, what in _OF_ONE_MODEL.items():
        if len(models) > 1 and given.get(field):
            raise ServeError(f"{what} belongs to one model: --{field.replace('_', '-')} needs a single --model")


def of_model(model: ModelFile, given: ShardValues) -> dict[str, Any]:
    """Return the flags of a shard for its model. One that was asked for by a name has it, unless an alias is set."""
    return {"model": model.path, **({"alias": model.name} if model.named and not given.get("alias") else {})}


def draft_tokens(speculate: int, given: ShardValues) -> int:
    """Return ``speculate``, the router's, or a default for shards that are told what drafts if it is 0."""
    return speculate or (_DRAFT_TOKENS if given.get("model_draft") or given.get("spec_type", "none") != "none" else 0)


def rollback_tokens(speculate: int) -> dict[str, Any]:
    """Return what shards need whose drafts have up to ``speculate`` tokens."""
    return {"rollback_tokens": min(speculate, MOST_ROLLBACK_TOKENS)} if speculate else {}


def check_rpc(shards: int, given: ShardValues) -> None:
    """Require that no rpc-server is named for several shards, since it serves one client at a time.

    Raises ServeError.
    """
    if shards > 1 and given.get("rpc"):
        raise ServeError(f"an rpc-server serves one shard at a time: --rpc needs a single shard. Given: {shards}")


def host_shares(shards: int) -> dict[str, Any]:
    """Return what divides the host's cores and memory among several shards."""
    if shards == 1:
        return {}
    return {
        "threads": max(1, len(os.sched_getaffinity(0)) // shards),
        "cache_ram": default_of(ShardConfig, "cache_ram") // shards,
    }


def memory_share(files: Sequence[Path], own: Path, shares: int, total_bytes: int | None = None) -> dict[str, Any]:
    """Return for how much memory a shard of the model ``own`` chooses its cells, if ``shares`` shards divide it.

    The weights of ``files``, all models among them, are in memory once. ``total_bytes``: None for what is free.
    """
    total = available_memory() if total_bytes is None else total_bytes
    if total is None:
        return {}
    of_own, of_all = _weight_bytes(own), sum(_weight_bytes(file) for file in files)
    return {"fit_host": max(0, of_own + max(0, total - of_all) // shares) >> 20}


def _weight_bytes(file: Path) -> int:
    try:
        return sum(part.stat().st_size for part in parts_of(file))
    except OSError:
        # The shard says what is wrong with it.
        return 0


def find_devices(shards: int, given: ShardValues) -> list[str]:
    """Return the names of the GPUs to divide among several shards; none if there is nothing to divide."""
    if shards == 1 or given.get("device") or given.get("gpu_layers") == 0 or is_toy(given):
        return []
    listing = subprocess.run(
        [sys.executable, "-m", "caravan_shard", "--list-devices"], capture_output=True, text=True, check=True
    )
    return [line.partition("\t")[0] for line in listing.stdout.splitlines()]


def device_shares(devices: Sequence[str], shards: int) -> list[dict[str, Any]]:
    """Return what gives each shard its own devices, or one that it shares with as few others as possible."""
    if not devices:
        return [{} for _ in range(shards)]
    shares: Iterable[list[str]] = (
        list(devices[number::shards]) or [devices[number % len(devices)]] for number in range(shards)
    )
    return [{"device": ",".join(share)} for share in shares]
