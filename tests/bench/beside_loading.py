"""Measures streams beside a download and a load: `PYTHONPATH=tests python -m bench.beside_loading [-t 1] [--rounds 3]`.

One server with a library has one model loaded, of which a client streams without pause. Another model is downloaded
from a hub on this machine, then loaded. The figures are the stream's tokens per second and its longest gap in that
time, over those of the quiet time before and after.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from bench.contenders import Common, Product
from bench.model_switch import Library
from bench.models import model
from bench.servers import Running, serving
from caravan_testing.stand_in_hub import stand_in_hub

_STREAMED, _LOADED = "streamed", "loaded"
_REPOSITORY = "demo/downloaded"
_TOKENS = 400
_QUIET_S = 8.0
_TIMEOUT_S = 600.0


@dataclass
class Stream:
    """A client that streams until it is told to end, and when each token came."""

    server: Running
    times: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Stream until the block ends."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            body = {"model": _STREAMED, "prompt": "Once", "stream": True, "max_tokens": _TOKENS, "ignore_eos": True}
            with _ask(self.server, "/v1/completions", body) as reply:
                # The gap from one answer to the next is not the server's alone.
                self.times.append(0.0)
                for line in reply:
                    if line.startswith(b"data: {"):
                        self.times.append(time.monotonic())
                    if self._ended.is_set():
                        break

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the seconds between tokens of one answer in a time."""
        pairs = pairwise(self.times)
        return [after - before for before, after in pairs if before and after and begin <= before and after <= end]


def _ask(server: Running, path: str, body: dict[str, Any], method: str = "POST") -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), headers, method=method)
    return urllib.request.urlopen(request, timeout=_TIMEOUT_S)


def _pull(server: Running) -> None:
    with _ask(server, "/api/pull", {"model": f"{_REPOSITORY}:Q4_1"}) as reply:
        last = reply.read().splitlines()[-1]
    if json.loads(last).get("status") != "success":
        raise SystemExit(f"the download failed: {last.decode()}")


def _load(server: Running) -> None:
    body = {"model": _LOADED, "prompt": "Once", "max_tokens": 1}
    _ask(server, "/v1/completions", body).read()


def _forget(server: Running) -> None:
    _ask(server, "/models/unload", {"model": _LOADED}).read()
    _ask(server, "/api/delete", {"model": f"{_REPOSITORY}:Q4_1"}, "DELETE").read()
    time.sleep(3.0)


def _hub(pipe: Connection, file: Path, mib: int, mib_per_s: float) -> None:
    """Serve a hub with one model, of ``mib`` MiB, until the parent hangs up."""
    content = file.read_bytes()
    with stand_in_hub() as hub:
        hub.add(_REPOSITORY, {"downloaded.Q4_1.gguf": content + os.urandom((mib << 20) - len(content))})
        hub.faults.bytes_per_s = mib_per_s * (1 << 20)
        pipe.send(hub.url)
        pipe.recv()


@contextmanager
def _running_hub(file: Path, mib: int, mib_per_s: float) -> Iterator[str]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_hub, args=(theirs, file, mib, mib_per_s))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join()


def _beside(stream: Stream, act: Callable[[Running], None]) -> tuple[float, float, float]:
    """Return rate and longest gap while ``act`` runs over those of quiet times, and the seconds that it took."""
    times = [time.monotonic()]
    time.sleep(_QUIET_S)
    times.append(time.monotonic())
    act(stream.server)
    times.append(time.monotonic())
    time.sleep(_QUIET_S)
    times.append(time.monotonic())
    before, during, after = (stream.gaps(*span) for span in pairwise(times))
    quiet = before + after
    rate = (len(during) / sum(during)) / (len(quiet) / sum(quiet))
    return rate, max(during) / max(quiet), times[2] - times[1]


def main() -> None:
    """Print the figures of each round, and their medians."""
    parser = argparse.ArgumentParser(prog="beside_loading", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--mib", type=int, default=600, help="size of the file that is downloaded")
    parser.add_argument("--mib-per-s", type=float, default=50.0, help="speed of the hub; 0: as fast as it goes")
    given = parser.parse_args()
    source = model("smollm2-q4_1")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="caravan-beside-")))
        (folder / "models").mkdir()
        for name in (_STREAMED, _LOADED):
            (folder / "models" / f"{name}.gguf").symlink_to(source)
        os.environ["HF_ENDPOINT"] = stack.enter_context(_running_hub(source, given.mib, given.mib_per_s))
        os.environ["HF_HUB_CACHE"] = str(folder / "cache")
        library = Library(
            name="beside",
            product=Product.CARAVAN,
            slots=2,
            cells=4096,
            folder=folder / "models",
            flags=("--models-hub", "--models-max", "2"),
        )
        server = stack.enter_context(serving(library, Common(model=source, threads=given.threads)))
        found: dict[str, list[tuple[float, float, float]]] = {"download": [], "load": []}
        for number in range(given.rounds + 1):
            stream = Stream(server)
            with stream.running():
                time.sleep(_QUIET_S)
                acts = {"download": _pull, "load": _load}
                figures = {name: _beside(stream, act) for name, act in acts.items()}
            _forget(server)
            if number:  # The first round warms everything up.
                for name, (rate, gap, seconds) in figures.items():
                    found[name].append((rate, gap, seconds))
                    print(f"{name}: {rate:.3f} of the rate, longest gap {gap:.2f} x, {seconds:.1f} s", flush=True)
    for name, rounds in found.items():
        rate, gap = (median(one[index] for one in rounds) for index in (0, 1))
        print(f"median, {name}: {rate:.3f} of the rate, longest gap {gap:.2f} x")


if __name__ == "__main__":
    main()
