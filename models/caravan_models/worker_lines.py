"""What a download's process and its parent say to each other: lines of JSON, one request and many answers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, assert_never

from caravan_models.errors import FetchError, FetchProblem
from caravan_models.fetched import FetchedModel
from caravan_models.known import known_model
from caravan_models.progress import FetchStage, Progress
from caravan_models.reference import HUB_PREFIX, KnownModel, Named, parse_hub

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
