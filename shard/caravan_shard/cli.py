"""The command `caravan-shard`: one model, one KV cache, served over gRPC to a router."""

import sys
from collections.abc import Sequence

import uvloop

from caravan_proto.flags import load
from caravan_proto.telemetry import configure_logging
from caravan_shard.backends.base import StartupError
from caravan_shard.config import ShardConfig
from caravan_shard.service.parent import end_with_parent
from caravan_shard.service.server import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run a shard until a signal. Return 0, or 2 if it cannot start with these flags."""
    config = load(ShardConfig, prog="caravan-shard", description=__doc__ or "", argv=argv)
    configure_logging(level=config.log_level, json_output=config.json_output)
    try:
        if config.exit_with_parent:
            end_with_parent()
        uvloop.run(serve(config))
    except StartupError as error:
        sys.stderr.write(f"caravan-shard: error: {error}\n")
        return 2
    return 0
