"""The commands `caravan pull`, `list`, `show` and `rm`."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from caravan_models.cache_layout import cache_folder
from caravan_models.cached_model import FetchedModel, found_model
from caravan_models.errors import FetchError, FetchProblem, needs_packages
from caravan_models.fetching import fetch_blocking
from caravan_models.gguf_facts import gguf_facts
from caravan_models.listing import size_text
from caravan_models.local_store import remove, stored_models, unfinished
from caravan_models.progress import shown
from caravan_models.reference import FORM, HUB_PREFIX, LocalFile, Named, hub_model, known_models, parse_reference
from caravan_proto.command_line import Parser

NAME_HELP = f"a known name (caravan list --known), or {FORM}"
_FAILED, _INTERRUPTED = 1, 130

Row = tuple[str, str]


def _parser(command: str, description: str) -> Parser:
    return Parser(prog=f"caravan {command}", description=description)


def run(program: str, work: Callable[[], None]) -> int:
    """Return 0 once ``work`` is done, or say in one line why not and return 1; 130 after Ctrl-C."""
    try:
        work()
    except FetchError as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        return _FAILED
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        sys.stderr.write(f"{program}: error: cannot use{where}: {error.strerror or error}\n")
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def named(text: str) -> Named:
    """Return what ``text`` names. Raises FetchError for a file, since only names are in the cache."""
    reference = parse_reference(text)
    if isinstance(reference, LocalFile):
        raise FetchError(FetchProblem.BAD_REFERENCE, f"{Path(text)} is a file, not the name of a model; pass {FORM}")
    return reference


def pull_parser() -> Parser:
    """Return the parser of `caravan pull`."""
    parser = _parser("pull", "Download a model.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", help=NAME_HELP)
    what.add_argument(
        "--file",
        nargs=3,
        action="append",
        metavar=("URL", "SHA256", "PATH"),
        help="download URL to PATH, unless it is there, and check its SHA-256; repeatable; the value of "
        "DOWNLOAD_TOKEN is sent to the URL's own host as a bearer token; s3://BUCKET/KEY uses AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL; az://CONTAINER/BLOB uses AZURE_STORAGE_ACCOUNT, and "
        "AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
    )
    return parser


def pull(argv: Sequence[str] | None = None) -> int:
    """Download a model, so that serving it needs no network; print the path of its first file.

    Or download files by their URLs, for a folder that hosts share; print their paths.
    """
    parser = pull_parser()
    arguments = parser.parse_args(argv)

    def pull_model() -> None:
        reference = named(arguments.name)
        with shown(reference.name, _say) as on_progress:
            fetched = fetch_blocking(reference, on_progress)
        if fetched.note:
            _say(fetched.note)
        sys.stdout.write(f"{fetched.model}\n")

    def pull_files() -> None:
        try:
            from caravan_models.file_download import download_file, wanted_file
        except ModuleNotFoundError as error:
            raise needs_packages(error) from error
        for wanted in [wanted_file(*words) for words in arguments.file]:
            with shown(wanted.path.name, _say) as on_progress:
                download_file(wanted, on_progress)
            sys.stdout.write(f"{wanted.path}\n")

    return run(parser.prog, pull_files if arguments.file else pull_model)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def list_parser() -> Parser:
    """Return the parser of `caravan list`."""
    parser = _parser("list", "List the models.")
    parser.add_argument("--known", action="store_true", help="list the models with short names, downloaded or not")
    return parser


def list_models(argv: Sequence[str] | None = None) -> int:
    """List the downloaded models, or those with short names."""
    parser = list_parser()
    known: bool = parser.parse_args(argv).known
    return run(parser.prog, _list_known if known else _list_stored)


def _list_known() -> None:
    _write_table([("NAME", "WHERE"), *((one.name, HUB_PREFIX + one.source.name) for one in known_models().values())])


def _list_stored() -> None:
    cache = cache_folder()
    # Of several names of one model, the first and shortest.
    short = {one.source.name: one.name for one in reversed(known_models().values())}
    rows = [
        (
            short.get(model.name, HUB_PREFIX + model.name),
            model.quantisation,
            size_text(model.size),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified_s)),
        )
        for model in stored_models(cache)
    ]
    if rows:
        _write_table([("NAME", "QUANTISATION", "SIZE", "CHANGED"), *rows])
    else:
        sys.stderr.write(f"no models in {cache}; get one with `caravan pull smollm2`\n")
    for one in unfinished(cache):
        sys.stderr.write(f"unfinished: {size_text(one.size)} of {one.repository}\n")


def _write_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(f"{line.rstrip()}\n")


def remove_parser() -> Parser:
    """Return the parser of `caravan rm`."""
    parser = _parser("rm", "Remove a model from the cache.")
    parser.add_argument("names", nargs="+", metavar="name", help=NAME_HELP)
    return parser


def remove_models(argv: Sequence[str] | None = None) -> int:
    """Remove models from the cache; say how much is free then. A server that runs keeps what it has loaded."""
    parser = remove_parser()
    names: list[str] = parser.parse_args(argv).names

    def remove_all() -> None:
        for reference in [named(name) for name in names]:
            freed = remove(hub_model(reference), cache_folder())
            sys.stdout.write(f"removed {reference.name}: {size_text(freed)}\n")

    return run(parser.prog, remove_all)


def show_parser() -> Parser:
    """Return the parser of `caravan show`."""
    parser = _parser("show", "Describe a model from its own files.")
    parser.add_argument("name", help=f"a GGUF file, {NAME_HELP}; it must be downloaded")
    parser.add_argument(
        "--fit",
        action="store_true",
        help="also show where a shard would place it and what is left; accepts the shard's flags",
    )
    return parser


def show_model(argv: Sequence[str] | None = None) -> int:
    """Describe a model from its own files."""
    parser = show_parser()
    arguments, shard_flags = parser.parse_known_args(argv)
    if shard_flags and not arguments.fit:
        parser.refuse(shard_flags)

    def show() -> None:
        model = found_model(arguments.name)
        _write_rows(rows(model))
        if arguments.fit:
            sys.stdout.write(f"\n{fit_report(model.model, shard_flags)}")

    return run(parser.prog, show)


def fit_report(file: Path, shard_flags: Sequence[str]) -> str:
    """Return what a shard with these flags would take of each memory. Raises FetchError with what the shard says."""
    command = [sys.executable, "-m", "caravan_shard", "--fit-report", "--log-level", "warning", "--model", str(file)]
    done = subprocess.run([*command, *shard_flags], capture_output=True, text=True, check=False)  # noqa: S603 - no shell
    if done.returncode != 0:
        line = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
        raise FetchError(FetchProblem.NO_MODEL, line.removeprefix("caravan-shard: error: "))
    return done.stdout


def rows(model: FetchedModel) -> Iterable[Row]:
    """Yield what is known of a model, each with its label. Raises FetchError, OSError."""
    facts = gguf_facts(model.parts)
    if not facts.architecture:
        raise FetchError(FetchProblem.NO_MODEL, f"{model.model} names no architecture: it is no model")
    yield "name", model.name
    if facts.title:
        yield "title", facts.title
    yield "architecture", facts.architecture
    yield "parameters", count_text(facts.parameter_count)
    if facts.quantisation:
        yield "quantisation", facts.quantisation
    if facts.trained_context is not None:
        yield "context", f"{facts.trained_context:,} tokens"
    if facts.layer_count is not None:
        yield "layers", str(facts.layer_count)
    if facts.licence:
        yield "licence", facts.licence
    yield "size", f"{size_text(model.size)} ({model.size:,} bytes)"
    if model.digest:
        yield "digest", f"sha256:{model.digest}"
    for part in model.parts:
        yield "file", _file(part)
    if model.projector is not None:
        yield "projector", _file(model.projector)


def _file(path: Path) -> str:
    return f"{path} ({size_text(path.stat().st_size)})"


def count_text(count: int) -> str:
    """Return a number of parameters as people write it, such as "134.5 M"."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return str(count)


def _write_rows(lines: Iterable[Row]) -> None:
    for label, value in list(lines):
        sys.stdout.write(f"{label:<14}{value}\n")
