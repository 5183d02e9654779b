"""Servers that commands talk to: one that runs, or one that is started for a command and ends with it."""

import argparse
import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caravan_models.cached_model import FetchedModel
from caravan_models.errors import FetchError
from caravan_models.fetching import fetch_blocking
from caravan_models.progress import shown
from caravan_models.reference import HUB_PREFIX, LocalFile, hub_model, parse_reference
from caravan_proto.command_line import Parser
from caravan_proto.flags import as_flags
from caravan_shard.service.starter import PARENT_PID

DEFAULT_URL = "http://127.0.0.1:3000"
_READY = "Caravan is ready on "
_ERROR = "error: "
# Of a reply that needs no generation; a model that is loaded first may take longer.
_TIMEOUT_S, _LOAD_TIMEOUT_S = 10.0, 1800.0
_END_S = 100.0


class ServerError(Exception):
    """A server cannot be used or started; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server's URL, without a slash at its end, and the key to use it; "" for none."""

    url: str
    api_key: str = ""

    def get(self, path: str) -> Any:
        """Return the JSON of a route. Raises ServerError."""
        return self._ask(urllib.request.Request(self.url + path), _TIMEOUT_S)  # noqa: S310 - the user's own URL

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = _TIMEOUT_S) -> Any:
        """Return the JSON with which a route answers ``body``. Raises ServerError."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})  # noqa: S310
        return self._ask(request, timeout_s)

    def _ask(self, request: urllib.request.Request, timeout_s: float) -> Any:
        if self.api_key:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        try:
            with opener_for(self.url).open(request, timeout=timeout_s) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{self.url}: {_message_of(error)}") from None
        except urllib.error.URLError as error:
            raise ServerError(f"no server answers at {self.url}: {error.reason}") from None
        except (OSError, ValueError) as error:
            raise ServerError(f"{self.url} is no Caravan server: {error}") from None

    def names(self) -> dict[str, str]:
        """Return the names under which models are listed, by each of their names. Raises ServerError."""
        found: dict[str, str] = {}
        for model in self.get("/v1/models").get("data", ()):
            for name in (model["id"], *model.get("aliases", ())):
                found.setdefault(name, model["id"])
        return found

    def context(self, name: str) -> int:
        """Return the tokens that a prompt and its output may have. The model is loaded first. Raises ServerError."""
        self.post("/api/generate", {"model": name, "stream": False}, _LOAD_TIMEOUT_S)
        loaded = self.get("/api/ps")["models"]
        return next((int(model["context_length"]) for model in loaded if model["model"] == name), 0)


def opener_for(url: str) -> urllib.request.OpenerDirector:
    """Return what opens ``url``: through the proxy that the environment names, unless it is on this host."""
    direct = [urllib.request.ProxyHandler({})] if _is_loopback(urllib.parse.urlsplit(url).hostname or "") else []
    return urllib.request.build_opener(*direct)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _message_of(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            body = json.loads(error.read())["error"]
        except (ValueError, KeyError, TypeError, OSError):
            return f"it answered with status {error.code}"
    return str(body["message"] if isinstance(body, dict) else body)


def add_server_flags(parser: Parser) -> None:
    """Add the flags of commands that use a server."""
    parser.add_argument(
        "--server", metavar="URL", default="", help=f"URL of the server [CARAVAN_SERVER, else {DEFAULT_URL}]"
    )
    parser.add_argument("--api-key", metavar="KEY", default="", help="its API key [CARAVAN_API_KEY]")


def add_start_flags(parser: Parser) -> None:
    """Add the flags of commands that start a server of their own where none has the model."""
    group = parser.add_argument_group("if no server that runs has the model")
    add = group.add_argument
    add(
        "-c",
        "--ctx-size",
        type=int,
        metavar="N",
        help="tokens of the context [what the model was trained for, if it fits]",
    )
    add("-ngl", "--gpu-layers", type=int, metavar="N", help="layers on GPUs [as many as fit]")
    add("--serve", metavar="FLAG=VALUE", action="append", default=[], help="a flag of caravan serve; repeatable")


def start_flags(parser: Parser, arguments: argparse.Namespace) -> list[str]:
    """Return what the flags of `add_start_flags` are for `caravan serve`, or end the program if one is wrong."""
    sizes = as_flags({"ctx_size": arguments.ctx_size, "gpu_layers": arguments.gpu_layers})
    return [*sizes, *passed_flags(parser, arguments.serve)]


def passed_flags(parser: Parser, others: Sequence[str]) -> list[str]:
    """Return ``others``, values of `--serve`, as flags, or end the program if one is none."""
    for other in others:
        if "=" not in other:
            parser.error(f"argument --serve must be FLAG=VALUE, such as threads=4. Given: {other!r}")
    return [f"--{other.lstrip('-')}" for other in others]


def server_of(url: str, api_key: str, environ: Mapping[str, str]) -> tuple[Server, bool]:
    """Return the server that is meant, and whether it was named by a flag or a variable."""
    named = url or environ.get("CARAVAN_SERVER", "")
    where = named if "://" in named or not named else f"http://{named}"
    return Server(
        (where or DEFAULT_URL).rstrip("/").removesuffix("/v1"), api_key or environ.get("CARAVAN_API_KEY", "")
    ), bool(named)


def names_of(text: str) -> list[str]:
    """Return the names under which a server may list the model that a user calls ``text``."""
    try:
        reference = parse_reference(text)
    except FetchError:
        return [text]
    if isinstance(reference, LocalFile):
        return [text, reference.path.name, reference.path.stem]
    return [text, reference.name, hub_model(reference).name, HUB_PREFIX + hub_model(reference).name]


def listed_name(server: Server, text: str) -> str:
    """Return the name of the model ``text`` on a server, that of its first one if ``text`` is "".

    Return "" if it has no such model. Raises ServerError.
    """
    names = server.names()
    if not text:
        return next(iter(names.values()), "")
    return next((names[name] for name in names_of(text) if name in names), "")


def unknown_model(server: Server, model: str) -> ServerError:
    """Return the error for a model that a server has not. Raises ServerError."""
    return ServerError(f"{server.url} has no model {model}; it has {', '.join(dict.fromkeys(server.names().values()))}")


@contextlib.contextmanager
def server_for(model: str, given: tuple[Server, bool], flags: Sequence[str]) -> Iterator[tuple[Server, str, bool]]:
    """Yield a server, the name of ``model`` there, and whether it was started with ``flags`` and ends with the block.

    ``given``: what `server_of` returns. A server that was named must have the model. Raises ServerError, FetchError.
    """
    server, named = given
    try:
        name = listed_name(server, model)
    except ServerError:
        if named:
            raise
        # Another program may use the port.
        name = ""
    if name:
        yield server, name, False
        return
    if named:
        raise unknown_model(server, model)
    if not model:
        raise ServerError(f"no server answers at {server.url}: name a model, such as smollm2, and one is started")
    with started(model, flags) as own:
        yield own, listed_name(own, model) or listed_name(own, ""), True


@contextlib.contextmanager
def started(model: str, flags: Sequence[str]) -> Iterator[Server]:
    """Start `caravan serve` with ``model`` on a free port; it ends with the block, and with this process.

    Raises ServerError with its message if it cannot start, and FetchError.
    """
    if not is_toy(flags):
        fetched(model)
    command = [sys.executable, "-m", "caravan_serve", "serve", model, "--port", "0", "--log-level", "warning", *flags]
    if sys.platform == "linux":
        command.append("--exit-with-parent")
    # A key or a port of the environment are those of another server.
    own = {
        "CARAVAN_API_KEY",
        "CARAVAN_API_KEYS_FILE",
        "CARAVAN_PORT",
        "CARAVAN_HOSTNAME",
        "CARAVAN_HANDOVER",
        "CARAVAN_STATE_FILE",
        "CARAVAN_CONFIG",
        "CARAVAN_ROOT_PATH",
        "CARAVAN_METRICS_PORT",
        "CARAVAN_METRICS_KEY",
        "CARAVAN_LOG_FILE",
    }
    environ = {name: value for name, value in os.environ.items() if name not in own} | {PARENT_PID: str(os.getpid())}
    with tempfile.TemporaryFile("w+") as log:
        # In a session of its own, it gets no Ctrl-C of the terminal.
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environ,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            if sys.stderr.isatty():
                sys.stderr.write(f"starting a server for {model}...\n")
            url = next((line.strip().removeprefix(_READY) for line in process.stdout if line.startswith(_READY)), "")
            if not url:
                process.wait()
                log.seek(0)
                raise ServerError(_last_problem(log.read()))
            yield Server(url)
        finally:
            _end(process)


def fetched(model: str) -> FetchedModel | None:
    """Download the model that ``model`` names, showing progress; None for a file. Raises FetchError."""
    reference = parse_reference(model)
    if isinstance(reference, LocalFile):
        return None
    with shown(reference.name) as on_progress:
        return fetch_blocking(reference, on_progress)


def is_toy(flags: Sequence[str]) -> bool:
    """Whether a server with these flags runs the toy model, whose name is no file."""
    return "--backend=fake" in flags or os.environ.get("CARAVAN_BACKEND") == "fake"


def _last_problem(log: str) -> str:
    lines = log.strip().splitlines() or ["it ended without a message"]
    # The shard's message is above that of `caravan serve`, which says only that it could not start.
    found = next((line for line in lines if line.startswith("caravan-shard: error: ")), lines[-1])
    return f"the server could not start: {found.partition(_ERROR)[2] or found}"


def _end(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def state_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder for what commands remember: that of XDG, or ~/.local/state."""
    base = environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "caravan"
