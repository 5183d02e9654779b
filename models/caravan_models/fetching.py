"""Gets models by name, for programs that go on with other work: each download is a process of its own.

A process and not a thread: the bytes of a download, their digest and the start of huggingface_hub (0.5 s, 40 MB) would
take the interpreter's lock from the streams that a router serves, and a thread that waits for a silent server cannot be
ended. A process can be killed at any byte, and the next one continues there.

The process and its parent say lines of JSON to each other: one request and many answers.
"""

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, assert_never

from caravan_models.cached_model import FetchedModel
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.progress import FetchStage, OnProgress, Progress, ignore_progress
from caravan_models.reference import HUB_PREFIX, KnownModel, Named, known_model, parse_hub

_COMMAND = (sys.executable, "-m", "caravan_models.worker")


Answer = Progress | FetchedModel | FetchError


def request_line(named: Named) -> bytes:
    """Return the request for a model."""
    text = named.name if isinstance(named, KnownModel) else HUB_PREFIX + named.name
    return json.dumps(text).encode() + b"\n"


def read_request(line: bytes) -> Named:
    """Return what a request asks for. Raises FetchError."""
    text: str = json.loads(line)
    if text.startswith(HUB_PREFIX):
        return parse_hub(text.removeprefix(HUB_PREFIX))
    known = known_model(text)
    assert known is not None, f"the parent knew {text!r}"
    return known


def answer_line(answer: Answer) -> bytes:
    """Return a line for the parent."""
    match answer:
        case Progress():
            row: dict[str, Any] = {"progress": asdict(answer) | {"stage": answer.stage.value}}
        case FetchedModel():
            row = {"fetched": asdict(answer)}
        case FetchError():
            row = {"error": {"problem": answer.problem.value, "sentence": str(answer)}}
        case _:
            assert_never(answer)
    return json.dumps(row, default=str).encode() + b"\n"


def read_answer(line: bytes) -> Answer:
    """Return what a line of the process says."""
    [(kind, row)] = json.loads(line).items()
    match kind:
        case "progress":
            return Progress(**row | {"stage": FetchStage(row["stage"])})
        case "fetched":
            projector = row["projector"]
            paths = {
                "model": Path(row["model"]),
                "parts": tuple(map(Path, row["parts"])),
                "projector": None if projector is None else Path(projector),
            }
            return FetchedModel(**row | paths)
        case "error":
            return FetchError(FetchProblem(row["problem"]), row["sentence"])
        case _:
            raise AssertionError(f"unknown line {line!r}")


async def fetch(named: Named, on_progress: OnProgress = ignore_progress) -> FetchedModel:
    """Return the model's files once all of them are in the cache; at once, if they are and the hub has no newer ones.

    ``on_progress`` is called on the event loop, at most some times in a second. A cancelled call leaves what has come,
    for the next one to continue. Of several processes that want one file, one downloads it. Raises FetchError.
    """
    # In its own session it gets no Ctrl-C: whoever cancels the call ends it.
    process = await asyncio.create_subprocess_exec(
        *_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # To one that has ended already, the transports of uvloop would raise RuntimeError.
        if not process.stdin.is_closing():
            process.stdin.write(request_line(named))
        fetched = None
        async for line in process.stdout:
            fetched = _heard(line, on_progress) or fetched
        return _result(fetched, await process.wait(), named)
    finally:
        if process.returncode is None:
            process.kill()
            # Also if this task is cancelled once more: asyncio waits for the process then.
            await process.wait()
        process.stdin.close()


def fetch_blocking(named: Named, on_progress: OnProgress = ignore_progress) -> FetchedModel:
    """Return the model's files as `fetch` does. An exception, such as Ctrl-C, ends the download."""
    with subprocess.Popen(  # noqa: S603 - a program of ours; the request goes to its standard input
        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request_line(named))
            process.stdin.flush()
            fetched = None
            for line in process.stdout:
                fetched = _heard(line, on_progress) or fetched
            return _result(fetched, process.wait(), named)
        finally:
            process.kill()


def _heard(line: bytes, on_progress: OnProgress) -> FetchedModel | None:
    """Pass on what a line says. Raises FetchError if it is one."""
    match read_answer(line):
        case Progress() as progress:
            on_progress(progress)
            return None
        case FetchedModel() as fetched:
            return fetched
        case FetchError() as error:
            raise error


def _result(fetched: FetchedModel | None, code: int, named: Named) -> FetchedModel:
    if fetched is None:
        raise FetchError(
            FetchProblem.BROKEN,
            f"the download of {named.name} ended with {'signal ' if code < 0 else 'exit code '}{abs(code)}, and may "
            "have said above why; start it again, it continues",
        )
    return fetched
