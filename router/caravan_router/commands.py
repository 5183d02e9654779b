"""The command `caravan`: its subcommands, each loaded only when asked for."""

import os
import sys

_USAGE = """usage: caravan COMMAND [FLAGS]

  serve    shards and a router on this host: caravan serve --model FILE.gguf
  router   a router for shards that run elsewhere (caravan-router)
  shard    one shard (caravan-shard)
  key      a fresh API key for --api-keys-file: caravan key alice >> keys.toml
  bench    measure a server: caravan bench --url http://127.0.0.1:3000

caravan COMMAND --help lists the flags.
"""


def main() -> int:
    """Dispatch to the subcommand named first."""
    command, flags = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    match command:
        case "serve":
            from caravan_router.serve.cli import main as serve

            return serve(flags)
        case "router":
            from caravan_router.cli import main as router

            return router(flags)
        case "shard":
            # Another program of this distribution: the router's packages never load llama.cpp.
            os.execv(sys.executable, [sys.executable, "-m", "caravan_shard", *flags])  # noqa: S606
        case "key":
            from caravan_router.auth.new_key import main as key

            return key(flags)
        case "bench":
            from caravan_router.bench.cli import main as bench

            return bench(flags)
        case "--help" | "-h":
            sys.stdout.write(_USAGE)
            return 0
        case _:
            sys.stderr.write(_USAGE)
    return 2
