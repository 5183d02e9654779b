"""The command `caravan launch`: starts a coding agent on a model, without touching the user's files."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from caravan_models.cached_model import found_model
from caravan_models.errors import FetchError
from caravan_models.gguf_facts import gguf_facts
from caravan_proto.command_line import Parser, nearest
from caravan_serve.agents import AGENTS, Launch, Target
from caravan_serve.servers import (
    Server,
    ServerError,
    add_server_flags,
    fetched,
    is_toy,
    listed_name,
    passed_flags,
    server_for,
    server_of,
    state_folder,
)

# The prompts of agents alone have 10 to 30 thousand tokens.
LEAST_CONTEXT = 65536
_INTERRUPTED = 130
_SCHEMES = ("http", "https", "all")
_THIS_HOST = ("127.0.0.1", "localhost")


def launch_parser() -> Parser:
    """Return the parser of `caravan launch`."""
    parser = Parser(
        prog="caravan launch",
        usage="caravan launch [FLAGS] AGENT [ARGS ...]",
        description="Start a coding agent on a model. A running server that has the model is used, otherwise one is "
        "started that ends with the agent. ARGS are for the agent.",
    )
    parser.add_argument("agent", metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("-m", "--model", metavar="MODEL", default="", help="the model [the first one of the server]")
    add_server_flags(parser)
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=LEAST_CONTEXT,
        metavar="N",
        help=f"tokens of the context of a server that is started, at least {LEAST_CONTEXT} [{LEAST_CONTEXT}]",
    )
    parser.add_argument(
        "--serve",
        metavar="FLAG=VALUE",
        action="append",
        default=[],
        help="a flag of caravan serve, for a server that is started; repeatable",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run an agent. Return its status, or 1 or 2 if it cannot be started, 130 after Ctrl-C."""
    parser = launch_parser()
    own, of_agent = divided(argv, AGENTS)
    arguments = parser.parse_args(own)
    name: str = arguments.agent
    agent = AGENTS.get(name)
    if agent is None:
        found = nearest(name, AGENTS)
        known = f"did you mean {found}?" if found else f"known are {', '.join(AGENTS)}"
        parser.error(f"unknown agent {name}; {known}")
    flags = ["--parallel=4", "--kv-layout=unified", f"--ctx-size={arguments.ctx_size}"]
    flags += passed_flags(parser, arguments.serve)
    program = shutil.which(agent.program)
    if program is None:
        sys.stderr.write(f"caravan launch: error: {agent.program} is not installed: {agent.install}\n")
        return 1
    given = server_of(arguments.server, arguments.api_key, os.environ)
    try:
        if not _is_served(given[0], arguments.model) and not is_toy(flags):
            check_trained_context(arguments.model)
        with server_for(arguments.model, given, flags) as (server, model, is_own):
            context = server.context(model)
            if context < LEAST_CONTEXT:
                raise ServerError(
                    f"{model} has a context of {context:,} tokens at {server.url}, and agents need {LEAST_CONTEXT:,}: "
                    f"start it with -c {LEAST_CONTEXT} --kv-layout unified"
                )
            folder = state_folder(os.environ) / "launch" / name
            target = Target(url=server.url, model=model, context=context, api_key=server.api_key, folder=folder)
            launch = agent.launch(target)
            write_files(folder, launch)
            command = [program, *launch.flags, *of_agent]
            environ = environment(launch, os.environ)
            if not is_own:
                os.execve(program, command, environ)  # noqa: S606
            return run_agent(command, environ)
    except (ServerError, FetchError) as error:
        sys.stderr.write(f"caravan launch: error: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"caravan launch: error: cannot use {error.filename}: {error.strerror}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def divided(argv: Sequence[str], agents: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Return the words up to the agent's name, and those after it, which are the agent's own."""
    place = next((place for place, word in enumerate(argv) if word in agents), len(argv) - 1)
    rest = list(argv[place + 1 :])
    return list(argv[: place + 1]), rest[1:] if rest[:1] == ["--"] else rest


def _is_served(server: Server, model: str) -> bool:
    try:
        return bool(listed_name(server, model))
    except ServerError:
        return False


def check_trained_context(model: str) -> None:
    """Require that a model that would be loaded reads enough. Downloads it. Raises ServerError, FetchError."""
    if not model:
        return
    found = fetched(model) or found_model(model)
    trained = gguf_facts(found.parts).trained_context
    if trained is not None and trained < LEAST_CONTEXT:
        raise ServerError(
            f"{model} was trained for a context of {trained:,} tokens, and agents need {LEAST_CONTEXT:,}: "
            "choose another model, such as qwen3:8b"
        )


def write_files(folder: Path, launch: Launch) -> None:
    """Write the profiles of a launch. Raises OSError."""
    for name, content in launch.files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        file.write_text(content)


def environment(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the agent."""
    kept = {name: value for name, value in environ.items() if name not in launch.removed}
    # The server may be on this host, which no proxy reaches.
    direct = {
        name: ",".join(filter(None, (environ.get(name, ""), *_THIS_HOST)))
        for name in ("no_proxy", "NO_PROXY")
        if any(environ.get(f"{scheme}_proxy") or environ.get(f"{scheme}_PROXY".upper()) for scheme in _SCHEMES)
    }
    return {**kept, **direct, **launch.variables}


def run_agent(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run an agent to its end and return its status. Ctrl-C is for the agent alone."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # A handler of its own program would be gone, but a signal that is ignored stays ignored.
        process = subprocess.Popen(  # noqa: S603
            command, env=dict(environ), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        )
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return 128 - code if code < 0 else code
