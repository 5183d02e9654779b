"""What is kept beside the output of `caravan batch` until it is whole, and how the output is made of the answers."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

_CHUNK_BYTES = 1 << 20


class JobError(Exception):
    """The files of a job cannot be used; the message says which, why, and what to do."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """``digest``: of the input. ``server``: URL of the server; "" for one that is started for the job.

    ``model``: what requests name; "" for what the input names.
    ``key``: by which the server knows the file and the batch, also if their ids were not noted. ``batch``: its id, once
    known.
    """

    digest: str
    server: str
    model: str
    key: str
    file: str = ""
    batch: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """The answers to the requests of ``source`` become ``output``."""

    source: Path
    output: Path

    @property
    def folder(self) -> Path:
        """What is left of a job that was cut off."""
        return self.output.with_name(f"{self.output.name}.batch")

    @property
    def state_file(self) -> Path:
        """For `--state-file` of a server that is started for the job."""
        return self.folder / "state.sqlite"

    def begun(self) -> Record | None:
        """Return the record of a job that was cut off; None for a new one. Raises JobError."""
        try:
            data = self._record.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JobError(f"cannot read {self._record}: {error.strerror}") from None
        again = f"delete {self.folder} to begin again"
        try:
            record = msgspec.json.decode(data, type=Record)
        except msgspec.MsgspecError:
            raise JobError(f"{self._record} is damaged: {again}") from None
        if record.digest != self._digest():
            raise JobError(f"{self.folder} is of a batch of another file than {self.source}: {again}")
        return record

    def begin(self, server: str, model: str) -> Record:
        """Return the record of a new job, which is kept from now on. Raises JobError."""
        record = Record(digest=self._digest(), server=server, model=model, key=secrets.token_hex(16))
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise JobError(f"cannot make {self.folder}: {error.strerror}") from None
        self.keep(record)
        return record

    def keep(self, record: Record) -> None:
        """Write ``record``: it is there as a whole or not at all. Raises JobError."""
        try:
            self._write(self._record, msgspec.json.encode(record))
        except OSError as error:
            raise JobError(f"cannot write {self._record}: {error.strerror}") from None

    @property
    def _record(self) -> Path:
        return self.folder / "batch.json"

    def _write(self, path: Path, data: bytes) -> None:
        part = path.with_name(f"{path.name}.part")
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)

    def _digest(self) -> str:
        try:
            with self.source.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise JobError(f"cannot read {self.source}: {error.strerror}") from None

    def requests(self, model: str) -> tuple[Path, str]:
        """Return the file to upload, in which all requests name ``model``, and the path that they are for.

        Lines that are no requests stay as they are: the server says what is wrong with them. Raises JobError.
        """
        endpoint, named = "", self.folder / "requests.jsonl"
        try:
            with self.source.open("rb") as source, named.open("wb") as target:
                for line in source:
                    try:
                        request = json.loads(line)
                        endpoint = endpoint or str(request["url"])
                        request["body"]["model"] = model or request["body"].get("model", "")
                    except (ValueError, KeyError, TypeError, AttributeError):
                        target.write(line)
                    else:
                        target.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise JobError(f"cannot copy {self.source} to {named}: {error.strerror}") from None
        if not endpoint:
            raise JobError(f'{self.source} has no request, such as {{"custom_id": "1", "url": "/v1/...", "body": ...}}')
        return named, endpoint

    def answer_file(self, kind: str) -> Path:
        """Return where answers of a kind, "output" or "error", are downloaded to."""
        return self.folder / f"{kind}.jsonl"

    def finish(self) -> None:
        """Write the output, in the order of the requests, and forget the job. Raises JobError."""
        part = self.folder / "whole.jsonl"
        try:
            with part.open("wb") as target, self.source.open("rb") as source:
                for answer in _in_order(source, [self.answer_file("output"), self.answer_file("error")]):
                    target.write(answer)
                target.flush()
                os.fsync(target.fileno())
            part.replace(self.output)
            shutil.rmtree(self.folder)
        except OSError as error:
            raise JobError(f"cannot write {self.output}: {error.strerror}") from None


def _in_order(source: BinaryIO, answers: list[Path]) -> Iterator[bytes]:
    """Yield the answers, each file of which has those of its kind in the order of the requests."""
    files = [path.open("rb") for path in answers if path.exists()]
    try:
        heads = [file.readline() for file in files]
        for line in source:
            if not line.strip():
                continue
            wanted = _id_of(line)
            for place, head in enumerate(heads):
                if head and _id_of(head) == wanted:
                    yield head
                    heads[place] = files[place].readline()
                    break
    finally:
        for file in files:
            file.close()


class _Named(msgspec.Struct):
    custom_id: str


_NAMED = msgspec.json.Decoder(_Named)


def _id_of(line: bytes) -> str:
    return _NAMED.decode(line).custom_id
