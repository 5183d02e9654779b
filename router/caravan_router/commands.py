"""The commands `caravan` and `caravan-router`. Each subcommand is imported only when it is run."""

import os
import sys

from caravan_proto.environment import end_on_early_sigterm, prepare_grpc

_USAGE = """usage: caravan COMMAND [FLAGS]

  serve    run shards and a router on this host: caravan serve --model FILE.gguf
  router   run a router for shards that run elsewhere (caravan-router)
  shard    run one shard (caravan-shard)
  key      print a new API key for --api-keys-file: caravan key alice >> keys.toml
  bench    measure a server: caravan bench --url http://127.0.0.1:3000

caravan COMMAND --help lists the flags.
"""


def main() -> int:
    """Run the subcommand that the first argument names."""
    command, flags = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    match command:
        case "serve":
            prepare_grpc()
            from caravan_router.serve.cli import main as serve

            return serve(flags)
        case "router":
            return _run_router(flags)
        case "shard":
            # A program of its own: the router's packages never load llama.cpp.
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


def router() -> int:
    """Run the command `caravan-router`."""
    return _run_router(sys.argv[1:])


def _run_router(flags: list[str]) -> int:
    end_on_early_sigterm()
    prepare_grpc()
    from caravan_router.cli import main as run

    return run(flags)
