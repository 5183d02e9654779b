"""The command `caravan serve`: serve models with one command, each a name, a place on a hub or a GGUF file."""

import argparse
import asyncio
import itertools
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from caravan_models.errors import FetchError
from caravan_proto.flags import add_flags, flag, resolve
from caravan_proto.limits import MOST_ROLLBACK_TOKENS
from caravan_proto.standard_output import write_at_once
from caravan_proto.telemetry import configure_logging
from caravan_router.app import run_router
from caravan_router.cli import STARTUP_ERRORS, startup_problem, stop_on_signals
from caravan_router.config import RouterConfig
from caravan_router.engine.fleet import Fleet
from caravan_serve.library.catalogue import CatalogueError
from caravan_serve.library.flags import LibraryFlags
from caravan_serve.library.setup import make_library
from caravan_serve.model_files import ModelFile, local_file, model_files, uses_toy, with_draft_file
from caravan_serve.shard_process import ShardProcess, ShardStartError
from caravan_serve.starting import Starting

_log = logging.getLogger(__name__)

# The default of a shard's --cache-ram.
_CACHE_RAM_MIB = 8192
# What --speculate is with a draft model, if it is not given.
_DRAFT_TOKENS = 8
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(LibraryFlags):
    """Flags of `caravan serve` that neither the router nor the shards have."""

    shards: int = flag(
        1, "number of shard processes per --model on this host, each with the whole model", low=1, high=64
    )


class _Help(argparse.Action):
    """Prints the router's flags, and then runs the shard program to print its own."""

    def __call__(self, parser: argparse.ArgumentParser, *_ignored: object) -> None:
        parser.print_help()
        sys.stdout.write("\nflags passed on to every shard; --model may be repeated:\n\n")
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "caravan_shard", "--help"], check=False)
        parser.exit()


def _parse(argv: Sequence[str] | None) -> tuple[ServeConfig, RouterConfig, list[str]]:
    parser = argparse.ArgumentParser(prog="caravan serve", description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", nargs=0, action=_Help, help="show this and the shard's flags")
    parser.usage = "caravan serve [MODEL ...] [FLAGS]"
    add_flags(parser, ServeConfig)
    add_flags(parser, RouterConfig)
    namespace, shard_flags = parser.parse_known_args(argv)
    serve = resolve(parser, ServeConfig, namespace, os.environ)
    router = resolve(parser, RouterConfig, namespace, os.environ)
    return (
        serve,
        router,
        [*shard_flags, "--log-level", router.log_level, *(["--json-output"] if router.json_output else [])],
    )


class ServeError(ValueError):
    """The models, or the flags of the shards, do not go together."""


def split_models(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the models that come first or after ``--model``, which may be repeated, and all other flags of the shards.

    A word after the first flag may be the value of a flag that only shards know.
    """
    models = list(itertools.takewhile(lambda word: not word.startswith("-"), flags))
    others: list[str] = []
    rest = iter(flags[len(models) :])
    for given in rest:
        if given in {"-m", "--model"}:
            models.append(next(rest, ""))
        elif given.startswith("--model="):
            models.append(given.removeprefix("--model="))
        else:
            others.append(given)
    return models, others


def check_models(models: Sequence[ModelFile], flags: Sequence[str]) -> None:
    """Require that several models can be told apart, and that ``flags`` suit all of them. Raises ServeError."""
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise ServeError(f"each model needs its own name. Given: {', '.join(model.path for model in models)}")
    given = {flag.partition("=")[0] for flag in flags}
    if len(models) > 1 and "--lora" in given:
        raise ServeError("an adapter belongs to one model: --lora needs a single --model")
    if len(models) > 1 and {"-mm", "--mmproj"} & given:
        raise ServeError("a projector belongs to one model: --mmproj needs a single --model")
    if len(models) > 1 and {"-a", "--alias"} & given:
        raise ServeError("an alias belongs to one model: --alias needs a single --model")
    if len(models) > 1 and {"-md", "--model-draft"} & given:
        raise ServeError("a draft model belongs to one model: --model-draft needs a single --model")


def model_flags(model: ModelFile, flags: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the flags of a shard for its model. One that was asked for by a name has it, unless an alias is set."""
    given = {flag.partition("=")[0] for flag in flags}
    has_alias = {"-a", "--alias"} & given or environment.get("CARAVAN_ALIAS")
    return ["--model", model.path, *(["--alias", model.name] if model.named and not has_alias else [])]


def draft_tokens(speculate: int, flags: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return ``speculate``, the router's, or a default for shards with a draft model if it is 0."""
    given = {flag.partition("=")[0] for flag in flags}
    has_draft_model = {"-md", "--model-draft"} & given or environment.get("CARAVAN_MODEL_DRAFT")
    return speculate or (_DRAFT_TOKENS if has_draft_model else 0)


def rollback_tokens(speculate: int, flags: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the flags of a shard whose drafts have up to ``speculate`` tokens, unless the user has set them."""
    given = {flag.partition("=")[0] for flag in flags}
    if not speculate or "--rollback-tokens" in given or "CARAVAN_ROLLBACK_TOKENS" in environment:
        return []
    return ["--rollback-tokens", str(min(speculate, MOST_ROLLBACK_TOKENS))]


def check_rpc(shards: int, flags: Sequence[str], environment: Mapping[str, str]) -> None:
    """Require that no rpc-server is named for several shards, since it serves one client at a time.

    Raises ServeError.
    """
    given = {flag.partition("=")[0] for flag in flags}
    if shards > 1 and ("--rpc" in given or environment.get("CARAVAN_RPC")):
        raise ServeError(f"an rpc-server serves one shard at a time: --rpc needs a single shard. Given: {shards}")


def host_shares(shards: int, flags: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the flags that divide the host's cores and memory among several shards, but for what the user has set."""
    given = {flag.partition("=")[0] for flag in flags}
    shares: list[str] = []
    if shards > 1 and not {"-t", "--threads"} & given and "CARAVAN_THREADS" not in environment:
        shares += ["--threads", str(max(1, len(os.sched_getaffinity(0)) // shards))]
    if shards > 1 and not {"-cram", "--cache-ram"} & given and "CARAVAN_CACHE_RAM" not in environment:
        shares += ["--cache-ram", str(_CACHE_RAM_MIB // shards)]
    return shares


def value_of(flags: Sequence[str], *names: str) -> str | None:
    """Return the last value that ``flags`` give to a flag with one of ``names``; None if they give none."""
    found = None
    for given, following in zip(flags, [*flags[1:], ""], strict=False):
        name, equals, value = given.partition("=")
        if name in names:
            found = value if equals else following
    return found


def find_devices(shards: int, flags: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs to divide among several shards; none if there is nothing to divide."""
    layers = value_of(flags, "-ngl", "--gpu-layers", "--n-gpu-layers") or environment.get("CARAVAN_GPU_LAYERS")
    chosen = value_of(flags, "-dev", "--device") or "CARAVAN_DEVICE" in environment
    is_fake = (value_of(flags, "--backend") or environment.get("CARAVAN_BACKEND")) == "fake"
    if shards == 1 or chosen or layers == "0" or is_fake:
        return []
    listing = subprocess.run(
        [sys.executable, "-m", "caravan_shard", "--list-devices"], capture_output=True, text=True, check=True
    )
    return [line.partition("\t")[0] for line in listing.stdout.splitlines()]


def device_shares(devices: Sequence[str], shards: int) -> list[list[str]]:
    """Return the flags that give each shard its own devices, or one that it shares with as few others as possible."""
    if not devices:
        return [[] for _ in range(shards)]
    shares = [list(devices[number::shards]) or [devices[number % len(devices)]] for number in range(shards)]
    return [["--device", ",".join(share)] for share in shares]


async def _announce_when_ready(fleet: Fleet, url: str) -> None:
    await fleet.wait_until_ready()
    _announce(fleet, url)


def _announce(fleet: Fleet, url: str) -> None:
    engine = fleet.engine("")
    path, body = "/generate_stream", '{"inputs":"The capital of France is","parameters":{"max_new_tokens":30}}'
    if engine is not None and not engine.model.generates:
        path, body = "/v1/embeddings", '{"input":"The capital of France"}'
        if engine.model.ranks:
            path, body = "/v1/rerank", '{"query":"The capital of France","documents":["Paris","Bread"]}'
    write_at_once(
        f"\nCaravan is ready on {url}\n\nTry:\n"
        f"  curl -N {url}{path} -H 'Content-Type: application/json' -d '{body}'\n\n"
    )


async def _serve(serve: ServeConfig, router: RouterConfig, shard_flags: list[str], folder: Path) -> None:
    texts, shard_flags = split_models(shard_flags)
    if not texts and os.environ.get("CARAVAN_MODEL"):
        texts = [os.environ["CARAVAN_MODEL"]]
    if uses_toy(shard_flags, os.environ):
        models = [local_file(text) for text in texts]
    else:
        models, shard_flags = await model_files(texts), await with_draft_file(shard_flags)
    check_models(models, shard_flags)
    if models and serve.has_library:
        raise ServeError("--models-dir, --models-file and --models-hub name all models that are served: drop --model")
    of_models = [model_flags(model, shard_flags, os.environ) for model in models]
    of_models = of_models or ([] if serve.has_library else [[]])
    total = len(of_models) * serve.shards
    check_rpc(total, shard_flags, os.environ)
    speculate = draft_tokens(router.speculate, shard_flags, os.environ)
    shard_flags = [*rollback_tokens(speculate, shard_flags, os.environ), *shard_flags]
    flags = [*host_shares(total, shard_flags, os.environ), *shard_flags]
    devices = device_shares(find_devices(total, shard_flags, os.environ), total)
    shards = [
        ShardProcess(f"shard-{number}", folder / f"{number}.sock", [*flags, *own, *of_models[number // serve.shards]])
        for number, own in enumerate(devices)
    ]
    stop = stop_on_signals()
    library_of = None
    if serve.has_library:
        shares = host_shares(serve.shards, shard_flags, os.environ)
        library_of = await make_library(serve, [*shares, *shard_flags], serve.shards, folder)
    names = [model.name for model in models] if len(models) > 1 else []
    by_model: dict[str, list[ShardProcess]] = {}
    for number, shard in enumerate(shards):
        by_model.setdefault(names[number // serve.shards] if names else "", []).append(shard)
    router = replace(
        router,
        shard=(*(shard.address for shard in shards), *router.shard),
        expected_model=tuple(dict.fromkeys((*router.expected_model, *names))),
        speculate=speculate,
    )
    async with asyncio.TaskGroup() as tasks:
        for shard in shards:
            tasks.create_task(shard.run())
        announcing: list[asyncio.Task[None]] = []

        def on_listening(fleet: Fleet, url: str) -> None:
            if library_of is not None:
                _announce(fleet, url)
                return
            _log.info("listening, waiting for the shards to load their model", extra={"url": url})
            announcing.append(tasks.create_task(_announce_when_ready(fleet, url)))
            announcing.append(tasks.create_task(Starting(fleet, by_model, router.shard_grace_s).run()))

        try:
            await run_router(router, stop, on_listening, library_of)
        finally:
            for task in announcing:
                task.cancel()
            await asyncio.gather(*(shard.stop() for shard in shards))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. Return 0, or 2 if the server cannot start with these flags."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        # There was nothing to end yet but a download, which continues when it is started again.
        return _INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    serve, router, shard_flags = _parse(argv)
    configure_logging(level=router.log_level, json_output=router.json_output)
    with tempfile.TemporaryDirectory(prefix="caravan-") as folder:
        try:
            uvloop.run(_serve(serve, router, shard_flags, Path(folder)))
        except* (ServeError, FetchError) as errors:
            problem = str(errors.exceptions[0])
        except* CatalogueError as errors:
            problem = str(errors.exceptions[0])
        except* ShardStartError as errors:
            problem = str(errors.exceptions[0])
        except* STARTUP_ERRORS as errors:
            problem = startup_problem(router, errors.exceptions[0])
        else:
            return 0
    sys.stderr.write(f"caravan serve: error: {problem}\n")
    return 2
