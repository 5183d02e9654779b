"""Counts how many prompts with media get the same tokens as from llama-server. Not run by the test suite.

``PYTHONPATH=tests python -m bench.same_media``: for each kind of projector and each layout, asks a shard and
llama-server of the same llama.cpp for greedy outputs of ``--prompts`` prompts with two media each, and prints a row of
a table. The models and projectors are random ones of about a megabyte, which are written for it.
"""

import argparse
import base64
import json
import os
import socket
import struct
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.paths import peer
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.media import MediaKind
from caravan_testing.media_kinds import HYBRID, KINDS, MadeKind
from caravan_testing.media_prompts import Medium, run_prompt

_MARKER = "<__the_medium__>"
_TOKENS = 32
_READY_S = 30


def main() -> None:
    """Measure all rows and print each as soon as it is known."""
    parser = argparse.ArgumentParser(prog="same_media", description=__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    given = parser.parse_args()
    print("| projector | layout | same outputs |")
    print("|---|---|---:|")
    for kind in (*KINDS, HYBRID):
        for layout in KvLayout:
            with tempfile.TemporaryDirectory() as folder:
                made = MadeKind(kind, layout, Path(folder))
                with _llama_server(made) as url:
                    same = sum(_is_same(made, url, seed) for seed in range(given.prompts))
                made.close()
            print(f"| {kind.name} | {layout.value} | {same} of {given.prompts} |", flush=True)


def _is_same(made: MadeKind, url: str, seed: int) -> bool:
    made.driver.engine.release_all()
    ours = run_prompt(made.driver, made.prompt(seed), max_new=_TOKENS)
    parts = made.parts(seed)
    prompt = {
        "prompt_string": "".join(_MARKER if isinstance(part, Medium) else part for part in parts),
        "multimodal_data": [base64.b64encode(_file(part)).decode() for part in parts if isinstance(part, Medium)],
    }
    body = {"prompt": prompt, "n_predict": _TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        theirs: list[int] = json.load(response)["tokens"]
    return ours == theirs


def _file(medium: Medium) -> bytes:
    """Return the medium as a PNG or WAV file."""
    shape = medium.shape
    if shape.kind is MediaKind.IMAGE:
        rows = [medium.data[3 * shape.width * y : 3 * shape.width * (y + 1)] for y in range(shape.height)]
        header = struct.pack(">IIBBBBB", shape.width, shape.height, 8, 2, 0, 0, 0)
        content = zlib.compress(b"".join(b"\0" + row for row in rows))
        return b"\x89PNG\r\n\x1a\n" + _png(b"IHDR", header) + _png(b"IDAT", content) + _png(b"IEND", b"")
    # IEEE floats, one channel.
    form = struct.pack("<HHIIHH", 3, 1, 16_000, 64_000, 4, 32)
    chunks = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(medium.data)) + medium.data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def _png(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@contextmanager
def _llama_server(made: MadeKind) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [peer("llama-server"), "-m", made.model, "--mmproj", made.projector, "--port", port, "-t", 1, "-c", 4096]
    # Speculation and stored prompts off, and flash attention as in the shard.
    command += ["-np", 1, "-fa", "on", "--no-webui", "--cache-ram", 0]
    environment = {**os.environ, "LLAMA_MEDIA_MARKER": _MARKER}
    process = subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    main()
