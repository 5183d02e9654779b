"""The command `caravan-shard`: one model, one KV cache, served over gRPC to a router."""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import uvloop

from caravan_proto.command_line import Parser
from caravan_proto.flags import load
from caravan_proto.telemetry import LogFileError, LogSettings, configure_logging
from caravan_shard.config import ShardConfig
from caravan_shard.named_models import with_model_files
from caravan_shard.placement_flags import parse_rpc_servers
from caravan_shard.service.memory_report import memory_report
from caravan_shard.service.server import serve
from caravan_shard.service.starter import end_with_parent
from caravan_shard.startup_error import StartupError

_log = logging.getLogger(__name__)

_INTERRUPTED = 130
_DESCRIPTION = (__doc__ or "") + (
    " With --list-devices, print the devices of this host and of --rpc, and exit. With --estimate, print as JSON what "
    "a shard with the other flags would take and what is free, and exit; with --fit-report, the same for people."
)


_REPORTS = {"--estimate", "--fit-report"}


def _list_devices(argv: Sequence[str] | None) -> int:
    """Print a line for each GPU: its name, its memory, what it is. Return 0; raises StartupError."""
    from caravan_shard.backends.llama.devices.devices import first_devices
    from caravan_shard.backends.llama.model.log import route_llama_log

    parser = Parser(prog="caravan-shard")
    parser.add_argument("--rpc", default=os.environ.get("CARAVAN_RPC", ""))
    try:
        rpc_servers = parse_rpc_servers(parser.parse_known_args(argv)[0].rpc)
    except ValueError as error:
        parser.error(str(error))
    route_llama_log()
    for device in first_devices(rpc_servers):
        sys.stdout.write(f"{device.name}\t{device.total_bytes >> 20} MiB\t{device.description}\n")
    return 0


async def _serve(config: ShardConfig) -> bool:
    return await serve(await with_model_files(config))


def _end_at_once() -> NoReturn:
    """End the process, with status 0, as it is.

    An exit of the usual kind waits for threads, and frees what llama.cpp has while one of them may still use it.
    """
    _log.warning("a step, a text or an encoding did not end in time: the process exits without freeing the model")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _report(argv: list[str]) -> int:
    """Print what a shard with the flags ``argv`` would take. Return 0; raises StartupError."""
    as_json = "--estimate" in argv
    config = asyncio.run(with_model_files(_configured([given for given in argv if given not in _REPORTS])))
    report = memory_report(config)
    sys.stdout.write(json.dumps(report.as_json()) + "\n" if as_json else report.as_text())
    return 0


def _configured(argv: Sequence[str] | None) -> ShardConfig:
    config = load(ShardConfig, prog="caravan-shard", description=_DESCRIPTION, argv=argv)
    try:
        configure_logging(LogSettings(level=config.log_level, json_output=config.json_output, file=config.log_file))
    except LogFileError as error:
        raise StartupError(str(error)) from error
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """Run a shard until a signal. Return 0, or 2 if it cannot start with these flags."""
    try:
        given = list(sys.argv[1:] if argv is None else argv)
        if "--list-devices" in given:
            return _list_devices(argv)
        if _REPORTS & set(given):
            return _report(given)
        config = _configured(argv)
        if config.exit_with_parent:
            end_with_parent()
        if not uvloop.run(_serve(config)):
            _end_at_once()
    except KeyboardInterrupt:
        # Before there is anything to end but a download, which continues when it is started again.
        return _INTERRUPTED
    except StartupError as error:
        sys.stderr.write(f"caravan-shard: error: {error}\n")
        return 2
    return 0
