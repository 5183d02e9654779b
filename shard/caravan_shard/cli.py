"""The command `caravan-shard`: one model, one KV cache, served over gRPC to a router."""

import argparse
import os
import sys
from collections.abc import Sequence

import uvloop

from caravan_proto.flags import load
from caravan_proto.telemetry import configure_logging
from caravan_shard.backends.base import StartupError
from caravan_shard.config import ShardConfig, parse_rpc_servers
from caravan_shard.service.parent import end_with_parent
from caravan_shard.service.server import serve

_DESCRIPTION = (__doc__ or "") + " With --list-devices, print the devices of this host and of --rpc, and exit."


def _list_devices(argv: Sequence[str] | None) -> int:
    """Print a line for each GPU: its name, its memory, what it is. Return 0; raises StartupError."""
    from caravan_shard.backends.llama.devices import first_devices
    from caravan_shard.backends.llama.log import route_llama_log

    parser = argparse.ArgumentParser(prog="caravan-shard", allow_abbrev=False)
    parser.add_argument("--rpc", default=os.environ.get("CARAVAN_RPC", ""))
    try:
        rpc_servers = parse_rpc_servers(parser.parse_known_args(argv)[0].rpc)
    except ValueError as error:
        parser.error(str(error))
    route_llama_log()
    for device in first_devices(rpc_servers):
        sys.stdout.write(f"{device.name}\t{device.total_bytes >> 20} MiB\t{device.description}\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a shard until a signal. Return 0, or 2 if it cannot start with these flags."""
    try:
        if "--list-devices" in (sys.argv[1:] if argv is None else argv):
            return _list_devices(argv)
        config = load(ShardConfig, prog="caravan-shard", description=_DESCRIPTION, argv=argv)
        configure_logging(level=config.log_level, json_output=config.json_output)
        if config.exit_with_parent:
            end_with_parent()
        uvloop.run(serve(config))
    except StartupError as error:
        sys.stderr.write(f"caravan-shard: error: {error}\n")
        return 2
    return 0
