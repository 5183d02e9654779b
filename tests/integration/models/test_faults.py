"""Whatever goes wrong with a model's name is told in one line, which says what it is and what to do."""

import errno
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from caravan_models.download import download
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.hub import HubSettings
from caravan_models.progress import ignore_progress
from caravan_models.reference import LocalFile, parse_reference
from caravan_testing.stand_in_hub import Content, StandInHub, small_gguf

_MODEL = small_gguf(300_000)
_LONGEST_LINE = 700


class Place(NamedTuple):
    """Where a fault is made."""

    hub: StandInHub
    settings: HubSettings
    monkeypatch: pytest.MonkeyPatch


Prepare = Callable[[Place], HubSettings | None]


@dataclass(frozen=True)
class Fault:
    """``says``: what the line has to contain; ``does``: what it tells to do."""

    name: str
    problem: FetchProblem
    says: str
    does: str
    text: str = "hf:demo/small:Q4_0"
    prepare: Prepare = field(default=lambda _place: None)


def faulty(**values: object) -> Prepare:
    """Return what sets faults of the hub."""

    def prepare(place: Place) -> None:
        for name, value in values.items():
            assert hasattr(place.hub.faults, name)
            setattr(place.hub.faults, name, value)

    return prepare


def changed(**values: object) -> Prepare:
    """Return what changes the settings."""
    return lambda place: replace(place.settings, **values)  # type: ignore[arg-type]


def with_files(**files: bytes) -> Prepare:
    """Return what gives the repository other files; two underscores stand for a dot."""

    def prepare(place: Place) -> None:
        place.hub.add("demo/small", {name.replace("__", ".").replace("--", "/"): data for name, data in files.items()})

    return prepare


def gated(place: Place) -> None:
    place.hub.repositories["demo/small"].gated = True


def gated_without_token(place: Place) -> HubSettings:
    gated(place)
    return replace(place.settings, token=None)


def private_without_token(place: Place) -> HubSettings:
    place.hub.repositories["demo/small"].private = True
    return replace(place.settings, token=None)


def no_such_host(place: Place) -> HubSettings:
    def getaddrinfo(*_given: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    place.monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return replace(place.settings, endpoint="http://hub.invalid")


def no_space(place: Place) -> None:
    usage = shutil._ntuple_diskusage(10**12, 10**12, 1000)
    place.monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)


def space_ends(place: Place) -> None:
    def pwrite(_descriptor: int, _data: bytes, _place: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place.monkeypatch.setattr(os, "pwrite", pwrite)


def cache_is_a_file(place: Place) -> None:
    place.settings.cache.write_text("no folder")


def parts_missing(place: Place) -> None:
    names = [f"big-Q4_0-0000{number}-of-00003.gguf" for number in (1, 3)]
    place.hub.add("demo/small", dict.fromkeys(names, _MODEL))


def projector_in_disguise(place: Place) -> None:
    place.hub.add("demo/small", {"small-Q4_0.gguf": small_gguf(architecture="clip")})


def begins_as_gguf_and_ends(place: Place) -> None:
    place.hub.add("demo/small", {"small-Q4_0.gguf": _MODEL[:60]})


P = FetchProblem
FAULTS = [
    Fault("no repository in the name", P.BAD_REFERENCE, "OWNER/REPOSITORY is missing", "pass hf:OWNER", "hf:small"),
    Fault("a path in the name", P.BAD_REFERENCE, "no hub allows", "pass hf:OWNER", "hf:../../etc/passwd"),
    Fault("a bad revision", P.BAD_REFERENCE, "'a..b' is no branch", "pass hf:OWNER", "hf:demo/small:Q4_0@a..b"),
    Fault("a bad quantisation", P.BAD_REFERENCE, "'Q 4' is neither", "pass hf:OWNER", "hf:demo/small:Q 4"),
    Fault("an unknown name", P.UNKNOWN_NAME, "smolm2: there is no such file", "one of gemma3, ", "smolm2"),
    Fault("a forgotten hf:", P.UNKNOWN_NAME, "no such name", "pass hf:demo/small:Q4_0", "demo/small:Q4_0"),
    Fault("a missing repository", P.NO_REPOSITORY, "no repository demo/other", "check the name", "hf:demo/other"),
    Fault("a private repository", P.NO_REPOSITORY, "or it is private", "set HF_TOKEN", prepare=private_without_token),
    Fault("a gated repository, no token", P.GATED, "is gated", "accept its terms at", prepare=gated_without_token),
    Fault("a gated repository, no right", P.GATED, "is gated", "then set HF_TOKEN", prepare=gated),
    Fault("a bad token", P.BAD_TOKEN, "not know the token", "set HF_TOKEN to a valid", prepare=changed(token="hf_x")),
    Fault(
        "a missing revision", P.NO_REVISION, "no revision v9", "leave out what follows the @", "hf:demo/small:Q4_0@v9"
    ),
    Fault(
        "a missing quantisation",
        P.NO_QUANTISATION,
        "has no Q5_K_M",
        "it has Q4_0 (300.0 kB), Q8_0 (4.1 kB)",
        "hf:demo/small:Q5_K_M",
    ),
    Fault(
        "a missing file", P.NO_FILE, "has no file x-Q4_0.gguf", "it has Q4_0 (300.0 kB)", "hf:demo/small:x-Q4_0.gguf"
    ),
    Fault(
        "several models",
        P.AMBIGUOUS,
        "one of several models",
        "a colon: Q4_0 (300.0 kB), Q8_0 (4.1 kB)",
        "hf:demo/small",
    ),
    Fault("no model", P.NO_MODEL, "no model in a GGUF file", "ends with -GGUF", prepare=with_files(README__md=b"")),
    Fault("missing parts", P.MISSING_PARTS, "has 2 of the 3 parts", "choose another", prepare=parts_missing),
    Fault("a projector", P.IS_PROJECTOR, "is a projector", "name the model", "hf:demo/small:mmproj-F16.gguf"),
    Fault(
        "a projector with another name",
        P.IS_PROJECTOR,
        "is a projector",
        "choose another file",
        prepare=projector_in_disguise,
    ),
    Fault(
        "no GGUF file",
        P.NOT_GGUF,
        "begins with b'<html>",
        "choose another file",
        prepare=with_files(**{"small-Q4_0__gguf": b"<html>" * 100}),
    ),
    Fault("a file that ends early", P.NOT_GGUF, "it ends early", "get it again", prepare=begins_as_gguf_and_ends),
    Fault("a wrong digest", P.WRONG_DIGEST, "has the digest", "try again", prepare=faulty(damaged_transfers=9)),
    Fault("no digest", P.NO_DIGEST, "names no digest", "use another hub", prepare=faulty(names_no_digest=True)),
    Fault("a wrong size", P.WRONG_SIZE, "bytes, not", "try again later", prepare=faulty(lies_about_size=5)),
    Fault("a longer file", P.WRONG_SIZE, "bytes, not", "try again later", prepare=faulty(lies_about_size=-5)),
    Fault(
        "a longer file without a range",
        P.WRONG_SIZE,
        "is longer than",
        "try again later",
        prepare=faulty(lies_about_size=-5, ignores_ranges=True),
    ),
    Fault("nobody listens", P.NO_NETWORK, "cannot reach", "check", prepare=changed(endpoint="http://127.0.0.1:1")),
    Fault("no such host", P.NO_NETWORK, "cannot reach", "check", prepare=no_such_host),
    Fault("no URL", P.NO_HUB, "must be a URL", "such as https://", prepare=lambda p: HubSettings(endpoint="hub")),
    Fault(
        "no hub", P.NO_HUB, "does not answer as a hub", "check HF_ENDPOINT", prepare=faulty(api_body=b"<html></html>")
    ),
    Fault("another API", P.NO_HUB, "does not answer as a hub", "check HF_ENDPOINT", prepare=faulty(api_body=b"[1]")),
    Fault("no commit", P.NO_HUB, "names no commit", "check HF_ENDPOINT", prepare=faulty(api_body=b'{"id": "x"}')),
    Fault("a circle", P.NO_HUB, "redirects in a circle", "check HF_ENDPOINT", prepare=faulty(api_redirects=True)),
    Fault("a hub that fails", P.HUB_FAILS, "status 503", "try again later", prepare=faulty(api_statuses=[503] * 9)),
    Fault(
        "too many requests",
        P.TOO_MANY_REQUESTS,
        "too many requests",
        "wait some",
        prepare=faulty(api_statuses=[429] * 9),
    ),
    Fault("no right", P.REFUSED, "refuses demo/small", "set HF_TOKEN to one", prepare=faulty(api_statuses=[403])),
    Fault("a cut connection", P.CUT_OFF, "cut off after", "it continues", prepare=faulty(cut_after=[9] + [0] * 99)),
    Fault("storage that fails", P.CUT_OFF, "status 503", "try again later", prepare=faulty(storage_statuses=[503] * 9)),
    Fault("wrong ranges", P.CUT_OFF, "another range came", "try again later", prepare=faulty(wrong_ranges=True)),
    Fault(
        "a file that is listed and gone",
        P.NO_FILE,
        "no longer has the file",
        "try again",
        prepare=faulty(hides=frozenset({"small-Q4_0.gguf"})),
    ),
    Fault("offline", P.NOT_CACHED, "HF_HUB_OFFLINE is set", "run `caravan pull hf:", prepare=changed(offline=True)),
    Fault("too little space", P.DISK_FULL, "which has 1.0 kB free", "caravan rm", prepare=no_space),
    Fault("space that ends", P.DISK_FULL, "became full", "free some space", prepare=space_ends),
    Fault(
        "a cache that is a file", P.CACHE_UNUSABLE, "cannot use the cache", "set HF_HUB_CACHE", prepare=cache_is_a_file
    ),
]


def test_there_is_a_fault_for_nearly_every_problem() -> None:
    seen = {fault.problem for fault in FAULTS}
    # Those of other commands and of an environment without huggingface_hub are tested elsewhere.
    assert set(FetchProblem) - seen == {P.BUSY, P.BROKEN, P.NEEDS_PACKAGES}


def provoke(fault: Fault, place: Place) -> None:
    reference = parse_reference(fault.text)
    assert not isinstance(reference, LocalFile)
    download(reference, fault.prepare(place) or place.settings, ignore_progress)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_told_in_one_line_that_says_what_to_do(
    fault: Fault, hub: StandInHub, settings: HubSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.add(
        "demo/small",
        {"small-Q4_0.gguf": _MODEL, "small-Q8_0.gguf": small_gguf(), "mmproj-F16.gguf": Content(small_gguf())},
    )
    with pytest.raises(FetchError) as failed:
        provoke(fault, Place(hub, settings, monkeypatch))
    line = str(failed.value)
    assert failed.value.problem is fault.problem, line
    assert fault.says in line
    assert fault.does in line
    assert "\n" not in line
    assert len(line) < _LONGEST_LINE
    assert "Traceback" not in line
