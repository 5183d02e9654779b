"""The commands `caravan ps` and `caravan stop`, for a server that runs."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from caravan_models.listing import size_text
from caravan_proto.command_line import Parser
from caravan_serve.servers import Server, ServerError, add_server_flags, listed_name, server_of, unknown_model

Row = tuple[str, ...]


def ps_parser() -> Parser:
    """Return the parser of `caravan ps`."""
    parser = Parser(prog="caravan ps", description="List the loaded models of a server, and what runs on them.")
    add_server_flags(parser)
    return parser


def stop_parser() -> Parser:
    """Return the parser of `caravan stop`."""
    parser = Parser(
        prog="caravan stop",
        description="Unload a model of a server that loads models on demand, once its requests have ended.",
    )
    parser.add_argument("model", help="a name of the model")
    add_server_flags(parser)
    return parser


def list_running(argv: Sequence[str]) -> int:
    """Print a line for each loaded model. Return 0, or 1 if no server answers."""
    arguments = ps_parser().parse_args(argv)
    server, _ = server_of(arguments.server, arguments.api_key, os.environ)
    return _done("caravan ps", lambda: _write_table(running_rows(server)))


def running_rows(server: Server) -> list[Row]:
    """Return the table of the loaded models. Raises ServerError."""
    shards = server.get("/admin/shards")["shards"]
    sequences, processes = Counter[str](), Counter[str]()
    for shard in shards:
        sequences[shard["model"] or ""] += shard["sequences"]
        processes[shard["model"] or ""] += shard["state"] == "serving"
    if not +processes:
        # Models that are loaded on demand, none of which is.
        return []
    return [
        (
            model["model"],
            size_text(model["size"]) if "size" in model else "",
            f"{model['context_length']:,}",
            str(processes[model["model"]]),
            str(sequences[model["model"]]),
        )
        for model in server.get("/api/ps")["models"]
        # Adapters are listed beside their models.
        if model["model"] in processes
    ]


def _write_table(rows: Sequence[Row]) -> None:
    if not rows:
        sys.stderr.write("no model is loaded; a request, or caravan run MODEL, loads one\n")
        return
    table = [("NAME", "SIZE", "CONTEXT", "SHARDS", "RUNNING"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(f"{line.rstrip()}\n")


def stop_model(argv: Sequence[str]) -> int:
    """Unload a model. Return 0, or 1 if that is not possible."""
    arguments = stop_parser().parse_args(argv)
    server, _ = server_of(arguments.server, arguments.api_key, os.environ)

    def stop() -> None:
        name = listed_name(server, arguments.model)
        if not name:
            raise unknown_model(server, arguments.model)
        server.post("/models/unload", {"model": name})
        sys.stdout.write(f"unloading {name}\n")

    return _done("caravan stop", stop)


def _done(program: str, work: Callable[[], None]) -> int:
    try:
        work()
    except ServerError as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        return 1
    return 0
