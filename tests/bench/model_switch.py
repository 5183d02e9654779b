"""Measures the way back to a model: `PYTHONPATH=tests python -m bench.model_switch [--rounds 5] [--tokens 3000]`.

Two models, room for one. A conversation on the first grows to ``--tokens``, the second answers a question, and then the
conversation goes on: the figure is the time to the first token of that turn, of Caravan with ``--models-dir`` and of
llama-server's router with the same files, in turns. Each server has answered a whole round before it is measured.
"""

import argparse
import json
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.contenders import Common, Contender, Product
from bench.models import model
from bench.paths import ROOT, peer
from bench.servers import Running, serving

_FIRST, _SECOND = "first", "second"
_TEXT = "the caravan crosses a wide and silent desert by night while stars tell its guides where wells lie hidden"
_WORDS = _TEXT.split()
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Library(Contender):
    """A server that loads models of a folder."""

    folder: Path

    def command(self, common: Common, port: int) -> list[str]:
        """Return the command that serves on ``port`` of 127.0.0.1."""
        flags = ["--models-dir", str(self.folder), "--port", str(port)]
        flags += ["-np", str(self.slots), "-c", str(self.cells), "-t", str(common.threads), *self.flags]
        if self.product is Product.CARAVAN:
            return [str(ROOT / ".venv" / "bin" / "caravan"), "serve", *flags]
        return [str(peer("llama-server")), *flags, "--host", "127.0.0.1", "--no-webui"]


@dataclass
class Conversation:
    """The messages of a conversation with the first model."""

    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, server: Running, text: str) -> float:
        """Add a turn. Return the seconds to the first token of its answer."""
        self.messages.append({"role": "user", "content": text})
        first_s, answer = _chat(server, _FIRST, self.messages)
        self.messages.append({"role": "assistant", "content": answer})
        return first_s


def _chat(server: Running, name: str, messages: Sequence[dict[str, str]]) -> tuple[float, str]:
    body = {"model": name, "messages": list(messages), "stream": True, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.monotonic()
    first_s, parts = 0.0, []
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                if choice["delta"].get("content"):
                    first_s = first_s or time.monotonic() - started
                    parts.append(choice["delta"]["content"])
    return first_s, "".join(parts)


def _round(server: Running, number: int, tokens: int) -> float:
    """Return the seconds to the first token after the way back."""
    conversation = Conversation()
    words = [_WORDS[(place * place + number) % len(_WORDS)] for place in range(tokens * 9 // 10)]
    conversation.say(server, f"{number}. " + " ".join(words))
    conversation.say(server, "Go on.")
    _chat(server, _SECOND, [{"role": "user", "content": f"What is {number} and {number}?"}])
    return conversation.say(server, "And then?")


def main() -> None:
    """Print the times of each round, and the median of their ratios."""
    parser = argparse.ArgumentParser(prog="model_switch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=3000, help="length of the conversation, roughly")
    parser.add_argument("--first", default="smollm2-q4_1", help="a model of bench.models, or a GGUF file")
    parser.add_argument("--second", default="smollm2-q4_0")
    parser.add_argument("-t", "--threads", type=int, default=2)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="caravan-switch-")))
        for name, source in ((_FIRST, given.first), (_SECOND, given.second)):
            shutil.copy(model(source), folder / f"{name}.gguf")
        common = Common(model=folder / f"{_FIRST}.gguf", threads=given.threads)
        servers = [
            stack.enter_context(
                serving(
                    Library(
                        name="router", product=product, slots=4, cells=16384, folder=folder, flags=("--models-max", "1")
                    ),
                    common,
                )
            )
            for product in (Product.CARAVAN, Product.LLAMA_SERVER)
        ]
        for server in servers:
            _round(server, 0, given.tokens)
        ratios = []
        for number in range(1, given.rounds + 1):
            ours, theirs = (_round(server, number, given.tokens) for server in servers)
            ratios.append(ours / theirs)
            print(f"round {number}: Caravan {ours:.2f} s, llama-server {theirs:.2f} s: {ratios[-1]:.3f}", flush=True)
    print(f"median of the ratios: {median(ratios):.3f}")


if __name__ == "__main__":
    main()
