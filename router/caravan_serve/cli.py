"""The command `caravan serve`: serve models with one command, each a name, a place on a hub or a GGUF file."""

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from caravan_models.errors import FetchError
from caravan_proto.config_file import read_config_file
from caravan_proto.flags import as_flags, resolve
from caravan_proto.standard_output import write_at_once
from caravan_proto.telemetry import LogFileError, configure_logging
from caravan_router.app import run_router
from caravan_router.cli import STARTUP_ERRORS, startup_problem, stop_on_signals
from caravan_router.config import RouterConfig
from caravan_router.engine.fleet import Fleet
from caravan_serve.catalogue.entries import CatalogueFileError
from caravan_serve.catalogue.setup import make_catalogue
from caravan_serve.serve_flags import ServeConfig, serve_parser
from caravan_serve.shard_flags import (
    SET_BY_ROUTER,
    ServeError,
    ShardValues,
    check_models,
    check_rpc,
    checked,
    device_shares,
    draft_tokens,
    find_devices,
    host_shares,
    is_toy,
    local_file,
    memory_share,
    model_files,
    of_model,
    rollback_tokens,
    shard_values,
    with_draft_file,
)
from caravan_serve.shard_process import ShardProcess, ShardStartError
from caravan_serve.starting import Starting
from caravan_shard.service.starter import end_with_parent

_log = logging.getLogger(__name__)

_INTERRUPTED = 130


def read_flags(argv: Sequence[str] | None) -> tuple[ServeConfig, RouterConfig, list[str], ShardValues]:
    """Return what the flags, the environment and a file say: of the command, the router, the models, the shards."""
    parser = serve_parser()
    namespace = parser.parse_models(sys.argv[1:] if argv is None else argv)
    file = read_config_file(parser, namespace, os.environ)
    serve = resolve(parser, ServeConfig, namespace, os.environ, file)
    router = resolve(parser, RouterConfig, namespace, os.environ, file)
    models, given = shard_values(parser, namespace, os.environ, file)
    return serve, router, models, {**given, **{name: getattr(router, name) for name in SET_BY_ROUTER}}


async def _announce_when_ready(fleet: Fleet, url: str, router: RouterConfig) -> None:
    await fleet.wait_until_ready()
    write_at_once(announcement(fleet, url, router))


def announcement(fleet: Fleet, url: str, router: RouterConfig) -> str:
    """Return what is printed once the server can be used: what it serves, and where."""
    engine = fleet.engine("")
    path, body = "/generate_stream", '{"inputs":"The capital of France is","parameters":{"max_new_tokens":30}}'
    models = ["loaded on demand"]
    if engine is not None:
        served = [one.model for one in fleet.engines]
        models = [f"{model.name}, {model.max_sequence_tokens:,} tokens of context for each request" for model in served]
        if not engine.model.generates:
            path, body = "/v1/embeddings", '{"input":"The capital of France"}'
            if engine.model.ranks:
                path, body = "/v1/rerank", '{"query":"The capital of France","documents":["Paris","Bread"]}'
    key = "" if not router.needs_key else '-H "Authorization: Bearer $KEY" '
    model_lines = "".join(f"  model  {model}\n" for model in models)
    return (
        f"\nCaravan is ready on {url}\n"
        f"{model_lines}"
        f"  page   {f'{url}/' if router.page else 'off'}\n"
        f"  APIs   {url}/v1 for OpenAI's clients, {url}/docs for all\n"
        f"  curl -N {url}{path} {key}-H 'Content-Type: application/json' -d '{body}'\n\n"
    )


async def _serve(
    serve: ServeConfig, router: RouterConfig, texts: Sequence[str], given: ShardValues, folder: Path
) -> None:
    if is_toy(given):
        models = [local_file(text) for text in texts]
    else:
        models, given = await model_files(texts), await with_draft_file(given)
    check_models(models, given)
    if not (models or serve.has_catalogue or is_toy(given)):
        raise ServeError("name a model, such as caravan serve smollm2; caravan list --known lists short names")
    if models and serve.has_catalogue:
        raise ServeError("--models-dir, --models-file and --models-hub name all models that are served: drop --model")
    of_models = [of_model(model, given) for model in models] or ([] if serve.has_catalogue else [{}])
    total = len(of_models) * serve.shards
    if total > 1 and models and not is_toy(given):
        files = [Path(model.path) for model in models]
        shares = [memory_share(files, file, total) for file in files]
        of_models = [{**share, **own} for share, own in zip(shares, of_models, strict=True)]
    check_rpc(total, given)
    speculate = draft_tokens(router.speculate, given)
    given = {**rollback_tokens(speculate), **given}
    devices = device_shares(find_devices(total, given), total)
    shards = [
        ShardProcess(
            f"shard-{number}",
            folder / f"{number}.sock",
            as_flags(checked({**host_shares(total), **own, **of_models[number // serve.shards], **given})),
        )
        for number, own in enumerate(devices)
    ]
    stop = stop_on_signals()
    catalogue_of = None
    if serve.has_catalogue:
        catalogue_of = await make_catalogue(serve, {**host_shares(serve.shards), **given}, serve.shards, folder)
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
            if catalogue_of is not None:
                write_at_once(announcement(fleet, url, router))
                return
            _log.info("listening, waiting for the shards to load their model", extra={"url": url})
            announcing.append(tasks.create_task(_announce_when_ready(fleet, url, router)))
            announcing.append(tasks.create_task(Starting(fleet, by_model, router.shard_grace_s).run()))

        try:
            await run_router(router, stop, on_listening, catalogue_of)
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
    serve, router, models, given = read_flags(argv)
    try:
        configure_logging(router.logging)
    except LogFileError as error:
        sys.stderr.write(f"caravan serve: error: {error}\n")
        return 2
    if serve.exit_with_parent:
        end_with_parent()
    with tempfile.TemporaryDirectory(prefix="caravan-") as folder:
        try:
            uvloop.run(_serve(serve, router, models, given, Path(folder)))
        except* (ServeError, FetchError) as errors:
            problem = str(errors.exceptions[0])
        except* CatalogueFileError as errors:
            problem = str(errors.exceptions[0])
        except* ShardStartError as errors:
            problem = str(errors.exceptions[0])
        except* STARTUP_ERRORS as errors:
            problem = startup_problem(router, errors.exceptions[0])
        else:
            return 0
    sys.stderr.write(f"caravan serve: error: {problem}\n")
    return 2
