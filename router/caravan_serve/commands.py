"""The command `caravan`. What a subcommand needs is imported only when it is run."""

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from caravan_proto import __version__
from caravan_proto.command_line import Parser, nearest
from caravan_proto.environment import prepare_grpc, raise_open_files
from caravan_proto.packages import Part, lack
from caravan_proto.standard_output import ending_with_its_reader


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. ``run`` and ``parser``: the function that runs it and that makes its parser, as MODULE:FUNCTION.

    ``needs``: the part whose packages it needs; None if it checks that itself, or needs none.
    """

    summary: str
    run: str
    parser: str
    needs: Part | None = None


_LAST_LINE = "caravan COMMAND --help lists the flags, caravan --version prints the version."

COMMANDS: Mapping[str, Command] = {
    "run": Command(
        "chat with a model in the terminal: caravan run smollm2, or git diff | caravan run smollm2 'summarise'",
        "caravan_serve.talk.cli:main",
        "caravan_serve.talk.cli:run_parser",
        Part.RUN,
    ),
    "serve": Command(
        "run shards and a router on this host: caravan serve smollm2, hf:OWNER/REPOSITORY:Q4_K_M or FILE.gguf",
        "caravan_serve.commands:serve",
        "caravan_serve.serve_flags:serve_parser",
        Part.SERVE,
    ),
    "batch": Command(
        "answer the requests of a file: caravan batch requests.jsonl -m smollm2 -o answers.jsonl",
        "caravan_serve.batch.cli:main",
        "caravan_serve.batch.cli:batch_parser",
        Part.RUN,
    ),
    "launch": Command(
        "start a coding agent on a model: caravan launch codex, claude, opencode, pi, cline, qwen or gemini",
        "caravan_serve.launch:main",
        "caravan_serve.launch:launch_parser",
    ),
    "ps": Command(
        "list the loaded models of a server, and what runs on them",
        "caravan_serve.operating:list_running",
        "caravan_serve.operating:ps_parser",
    ),
    "stop": Command(
        "unload a model of a server",
        "caravan_serve.operating:stop_model",
        "caravan_serve.operating:stop_parser",
    ),
    "pull": Command(
        "get a model by its name, for later use: caravan pull smollm2",
        "caravan_models.cli:pull",
        "caravan_models.cli:pull_parser",
    ),
    "list": Command(
        "name the models that are here", "caravan_models.cli:list_models", "caravan_models.cli:list_parser"
    ),
    "show": Command(
        "say what a model is, by its own files", "caravan_models.cli:show_model", "caravan_models.cli:show_parser"
    ),
    "rm": Command(
        "remove a model that is here", "caravan_models.cli:remove_models", "caravan_models.cli:remove_parser"
    ),
    "key": Command(
        "print a new API key for --api-keys-file: caravan key alice >> keys.toml",
        "caravan_router.auth.key_file:main",
        "caravan_router.auth.key_file:key_parser",
        Part.DIALECTS,
    ),
    "audit": Command(
        "check an audit log of --audit-log: caravan audit verify FILE",
        "caravan_router.accounting.audit_cli:main",
        "caravan_router.accounting.audit_cli:audit_parser",
        Part.DIALECTS,
    ),
    "router": Command(
        "run a router for shards that run elsewhere (caravan-router)",
        "caravan_router.__main__:run",
        "caravan_serve.commands:router_parser",
    ),
    "shard": Command(
        "run one shard (caravan-shard)", "caravan_serve.commands:shard", "caravan_serve.commands:shard_parser"
    ),
    "rpc-server": Command(
        "lend this host's devices to a shard on another host",
        "caravan_shard.rpc_server:main",
        "caravan_shard.rpc_server:rpc_server_parser",
        Part.SHARD,
    ),
    "replay": Command(
        "play again what a router decided, as it was or otherwise: caravan replay FILE",
        "caravan_serve.commands:replay",
        "caravan_studio.replay.cli:replay_parser",
        Part.ROUTER,
    ),
    "bench": Command(
        "measure a server: caravan bench --url http://127.0.0.1:3000",
        "caravan_serve.bench.cli:main",
        "caravan_serve.bench.cli:bench_parser",
        Part.BENCH,
    ),
    "build-llama": Command(
        "build llama.cpp with Caravan's kernels, and install it into this environment",
        "caravan_shard.build_llama:main",
        "caravan_shard.build_llama:build_parser",
    ),
    "completion": Command(
        "print the completion of a shell: source <(caravan completion bash)",
        "caravan_serve.completion:main",
        "caravan_serve.completion:completion_parser",
    ),
}


@ending_with_its_reader()
def main() -> int:
    """Run the subcommand that the first argument names."""
    word, flags = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if word == "help":
        word, flags = (flags[0], ["--help"]) if flags else ("--help", [])
    if word in {"--help", "-h"}:
        sys.stdout.write(usage())
        return 0
    if word in {"--version", "-V"}:
        sys.stdout.write(f"caravan {__version__}\n")
        return 0
    command = COMMANDS.get(word)
    if command is None:
        sys.stderr.write(f"caravan: error: {problem_of(word, flags)}\n")
        return 2
    if command.needs is not None and (lacking := lack(command.needs)):
        sys.stderr.write(f"caravan {word}: error: it {lacking}\n")
        return 2
    status: int = function_of(command.run)(flags)
    return status


def function_of(place: str) -> Any:
    """Return the function at MODULE:FUNCTION."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def usage() -> str:
    """Return what `caravan --help` prints."""
    lines = [f"  {name:<13}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: caravan COMMAND [FLAGS]", "", *lines, "", _LAST_LINE, ""])


def problem_of(word: str, flags: list[str]) -> str:
    """Return why ``word`` is no command, and what was probably meant."""
    from caravan_models.reference import hub_place, known_model
    from caravan_serve.peers import COMMAND_ANSWERS
    from caravan_serve.peers import COMMANDS as FOREIGN

    if not word:
        return f"no command given, such as caravan run smollm2; the others: {', '.join(COMMANDS)}"
    if word in COMMAND_ANSWERS:
        return f"unknown command {word}: {COMMAND_ANSWERS[word]}"
    if word in FOREIGN:
        return f"unknown command {word}; did you mean {' '.join(['caravan', FOREIGN[word], *flags])}?"
    if word.startswith("-"):
        return f"a command comes first; did you mean {' '.join(['caravan serve', word, *flags])}?"
    if known_model(word) or hub_place(word) or Path(word).suffix.lower() == ".gguf":
        return f"{word} is a model; did you mean caravan run {word}, or caravan serve {word}?"
    found = nearest(word, COMMANDS) or FOREIGN.get(nearest(word, FOREIGN), "")
    return f"unknown command {word}; {f'did you mean caravan {found}?' if found else 'caravan --help lists all'}"


def serve(flags: list[str]) -> int:
    """Run `caravan serve`, whose modules are imported when the process is ready for them."""
    prepare_grpc()
    raise_open_files()
    from caravan_serve.cli import main as serve_models

    return serve_models(flags)


def shard(flags: list[str]) -> NoReturn:
    """Become a shard, a program of its own: the router's packages never load llama.cpp."""
    os.execv(sys.executable, [sys.executable, "-m", "caravan_shard", *flags])  # noqa: S606


def replay(flags: list[str]) -> int:
    """Run `caravan replay` with the flags of a router."""
    from caravan_router.config import RouterConfig
    from caravan_studio.replay.cli import main as replay_recording

    return replay_recording(RouterConfig, flags)


def router_parser() -> Parser:
    """Return the parser of `caravan router`."""
    from caravan_proto.flags import parser_of
    from caravan_router.config import RouterConfig

    return parser_of(RouterConfig, "caravan-router", "")


def shard_parser() -> Parser:
    """Return the parser of `caravan shard`."""
    from caravan_proto.flags import parser_of
    from caravan_shard.config import ShardConfig

    return parser_of(ShardConfig, "caravan-shard", "")
