"""The command `caravan batch`: its command line, its progress bar, and how it goes on after it was killed."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from caravan_models.errors import FetchError
from caravan_proto.command_line import ForeignFlags, Parser
from caravan_serve.batch.job import Job, JobError, Record
from caravan_serve.batch.remote import Progress as BatchProgress
from caravan_serve.batch.remote import RemoteBatches
from caravan_serve.servers import (
    Server,
    ServerError,
    add_server_flags,
    add_start_flags,
    listed_name,
    server_of,
    start_flags,
    started,
    unknown_model,
)

_INTERRUPTED = 130
_POLL_S = 0.2
# A server for one batch: what its files take is not limited by what others need.
_OWN_FLAGS = ("--file-space=65536", "--file-life-s=31536000")


def batch_parser() -> Parser:
    """Return the parser of `caravan batch`."""
    parser = Parser(
        prog="caravan batch",
        usage="caravan batch FILE -m MODEL -o OUT [FLAGS]",
        description="Answer the requests of a file in OpenAI's batch format. A running server that has the model is "
        "used, otherwise one is started that ends with the batch. If it is cut off, the same command goes on.",
        foreign=ForeignFlags(
            renamed={
                "--output-file": "--output",
                "--host": "--server",
                "--url": "--server",
                "--base-url": "--server",
                "--max-model-len": "--ctx-size",
            },
            answers={
                **dict.fromkeys(("-i", "--input-file"), "name the file without a flag: caravan batch FILE"),
                **dict.fromkeys(("--concurrency", "--max-num-seqs"), "pass --serve parallel=N"),
                "--endpoint": "leave it out: each line names its own as `url`",
            },
        ),
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="requests, one JSON object a line")
    parser.add_argument(
        "-m", "--model", metavar="MODEL", default="", help="a known name, hf:OWNER/REPOSITORY or a GGUF file"
    )
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, required=True, help="where the answers are written")
    add_server_flags(parser)
    add_start_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Answer a file. Return 0, 1 if that was not possible or a request failed, 130 after Ctrl-C."""
    parser = batch_parser()
    arguments = parser.parse_models(argv)
    flags = start_flags(parser, arguments)
    given = server_of(arguments.server, arguments.api_key, os.environ)
    if not arguments.model and not given[1]:
        parser.error("name a model, such as -m smollm2; caravan list --known lists short names")
    if not arguments.file.is_file():
        parser.error(f"there is no file {arguments.file}")
    if arguments.output.exists():
        parser.error(f"{arguments.output} exists: name another file after -o, or delete it")
    job = Job(arguments.file, arguments.output)
    try:
        return _answer(job, arguments.model, given, flags)
    except (ServerError, FetchError, JobError) as error:
        sys.stderr.write(f"caravan batch: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("caravan batch: cut off; the same command goes on\n")
        return _INTERRUPTED


def _answer(job: Job, model: str, given: tuple[Server, bool], flags: Sequence[str]) -> int:
    record = job.begun()
    with ExitStack() as held:
        server, record = _server(job, record, model, given, flags, held)
        remote = RemoteBatches(server)
        held.callback(remote.close)
        record = _begun(job, remote, record)
        done = _watched(remote, record)
        if done.errors or done.status == "failed":
            job.keep(msgspec.structs.replace(record, file="", batch="", key=record.key + "-"))
            raise ServerError(f"the file was refused: {'; '.join(done.errors[:5]) or done.status}")
        for kind, file_id in (("output", done.output_file), ("error", done.error_file)):
            if file_id is not None:
                remote.download(file_id, job.answer_file(kind))
        if record.server:
            for used in filter(None, (record.file, done.output_file, done.error_file)):
                remote.delete(used)
    job.finish()
    sys.stderr.write(f"{done.completed} of {done.total} requests answered: {job.output}\n")
    if done.failed:
        sys.stderr.write(f"caravan batch: error: {done.failed} requests failed; {job.output} says why\n")
    return 1 if done.failed else 0


def _server(
    job: Job, record: Record | None, model: str, given: tuple[Server, bool], flags: Sequence[str], held: ExitStack
) -> tuple[Server, Record]:
    """Return the server for a job, which may be one that ends with ``held``, and the job's record.

    Raises ServerError, FetchError, JobError.
    """
    server, named = given
    if record is not None and record.server:
        return Server(record.server, server.api_key), record
    if record is None:
        try:
            name = listed_name(server, model)
        except ServerError:
            if named:
                raise
            name = ""
        if name:
            return server, job.begin(server.url, name if model else "")
        if named:
            raise unknown_model(server, model)
        record = job.begin("", model)
    if not model:
        raise JobError(f"name the model with -m: {job.folder} is of a server that was started for {record.model}")
    own = held.enter_context(started(model, [*_OWN_FLAGS, f"--state-file={job.state_file.resolve()}", *flags]))
    return own, record


def _begun(job: Job, remote: RemoteBatches, record: Record) -> Record:
    """Return the record with the batch that the server has of it. Raises ServerError, JobError."""
    if record.batch:
        return record
    # A single model answers to every name.
    requests, endpoint = job.requests(record.model if record.server else "")
    record = msgspec.structs.replace(record, file=remote.upload(requests, record.key))
    job.keep(record)
    record = msgspec.structs.replace(record, batch=remote.begin(record.file, endpoint, record.key))
    job.keep(record)
    return record


def _watched(remote: RemoteBatches, record: Record) -> BatchProgress:
    """Show how far a batch is until it has ended, and return it. Raises ServerError."""
    with _bar() as (bar, task):
        while True:
            now = remote.progress(record.batch)
            bar.update(task, total=now.total or None, completed=now.completed + now.failed, description=now.status)
            if now.has_ended:
                return now
            time.sleep(_POLL_S)


@contextmanager
def _bar() -> Iterator[tuple[Progress, TaskID]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        yield bar, bar.add_task("", total=None)
