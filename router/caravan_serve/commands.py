"""The command `caravan`. Each subcommand is imported only when it is run."""

import os
import sys

from caravan_proto import __version__
from caravan_proto.environment import prepare_grpc, raise_open_files
from caravan_proto.packages import Part, lack
from caravan_proto.standard_output import ending_with_its_reader

_USAGE = """usage: caravan COMMAND [FLAGS]

  serve        run shards and a router on this host: caravan serve smollm2, hf:OWNER/REPOSITORY:Q4_K_M or FILE.gguf
  router       run a router for shards that run elsewhere (caravan-router)
  shard        run one shard (caravan-shard)
  pull         get a model by its name, for later use: caravan pull smollm2
  list         name the models that are here
  show         say what a model is, by its own files
  rm           remove a model that is here
  key          print a new API key for --api-keys-file: caravan key alice >> keys.toml
  replay       play again what a router decided, as it was or otherwise: caravan replay FILE
  bench        measure a server: caravan bench --url http://127.0.0.1:3000
  build-llama  build llama.cpp with Caravan's kernels, and install it into this environment

caravan COMMAND --help lists the flags, caravan --version prints the version.
"""
# What commands need of other packages. The others check it themselves, or need none.
_NEEDS = {"serve": Part.SERVE, "key": Part.DIALECTS, "replay": Part.ROUTER, "bench": Part.BENCH}


@ending_with_its_reader()
def main() -> int:
    """Run the subcommand that the first argument names."""
    command, flags = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command in _NEEDS and (lacking := lack(_NEEDS[command])):
        sys.stderr.write(f"caravan {command}: error: it {lacking}\n")
        return 2
    match command:
        case "serve":
            prepare_grpc()
            raise_open_files()
            from caravan_serve.cli import main as serve

            return serve(flags)
        case "router":
            from caravan_router.__main__ import run as run_router

            return run_router(flags)
        case "shard":
            # A program of its own: the router's packages never load llama.cpp.
            os.execv(sys.executable, [sys.executable, "-m", "caravan_shard", *flags])  # noqa: S606
        case "pull":
            from caravan_models.cli import pull

            return pull(flags)
        case "list":
            from caravan_models.cli import list_models

            return list_models(flags)
        case "show":
            from caravan_models.cli import show_model

            return show_model(flags)
        case "rm":
            from caravan_models.cli import remove_models

            return remove_models(flags)
        case "key":
            from caravan_router.auth.key_file import main as key

            return key(flags)
        case "replay":
            from caravan_router.config import RouterConfig
            from caravan_studio.replay.cli import main as replay

            return replay(RouterConfig, flags)
        case "bench":
            from caravan_serve.bench.cli import main as bench

            return bench(flags)
        case "build-llama":
            from caravan_shard.build_llama import main as build_llama

            return build_llama(flags)
        case "--help" | "-h":
            sys.stdout.write(_USAGE)
            return 0
        case "--version":
            sys.stdout.write(f"caravan {__version__}\n")
            return 0
        case _:
            sys.stderr.write(_USAGE)
    return 2
