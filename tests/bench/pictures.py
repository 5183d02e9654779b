"""Compares answers about pictures with llama-server's. Not run by the test suite.

``PYTHONPATH=tests python -m bench.pictures``: both servers have the demo model and a projector of ``--layers`` layers
of the size of SigLIP's base model, with random weights: its answers mean nothing and take the time that real ones would
take. In each of ``--rounds`` rounds both get the same loads in turn:

- ``new``: eight clients ask about sixteen pictures;
- ``again``: eight clients ask six things about each of four pictures;
- ``elsewhere``: the same, with text of their own before the picture, as in conversations that differ;
- ``talk``: a conversation of ten turns, with a picture in the first turn and another one in the fourth;
- ``beside``: four streams, and somebody asks about a picture of a megapixel.

Prints for each load the medians of the rounds and the ratio's median, lowest and highest value; for ``beside`` the
longest gap of the streams from the question to its first token.
"""

import argparse
import asyncio
import base64
import io
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, TypeAlias

import aiohttp
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench.contenders import Common, Contender, Product
from bench.paths import DEMO_MODEL
from bench.servers import serving
from caravan_serve.bench.workloads import seeded, words
from caravan_testing.projectors import embeddings_of, write_vision

# A picture is scaled to this side and read as 256 patches, each of them a token.
SIDE = 512
_WIDTH, _INNER, _HEADS, _PATCH = 768, 3072, 12, 32


def write_projector(path: Path, layers: int) -> None:
    """Write to ``path`` one of ``layers`` layers of the size of SigLIP's base model, for the demo model."""
    size = embeddings_of(DEMO_MODEL).shape[1]
    random = np.random.default_rng(0)

    def drawn(*sizes: int) -> NDArray[np.float16]:
        numbers: NDArray[np.float32] = random.standard_normal(sizes, np.float32) / np.sqrt(np.prod(sizes[1:]))
        return numbers.astype(np.float16)

    tensors: dict[str, NDArray[np.float16] | NDArray[np.float32]] = {
        "v.patch_embd.weight": drawn(_WIDTH, 3, _PATCH, _PATCH),
        "mm.0.weight": drawn(_WIDTH, _WIDTH),
        "mm.0.bias": np.zeros(_WIDTH, np.float32),
        "mm.1.weight": drawn(size, _WIDTH),
        "mm.1.bias": np.zeros(size, np.float32),
    }
    for block in (f"v.blk.{layer}" for layer in range(layers)):
        for norm in ("ln1", "ln2"):
            tensors[f"{block}.{norm}.weight"] = np.ones(_WIDTH, np.float32)
            tensors[f"{block}.{norm}.bias"] = np.zeros(_WIDTH, np.float32)
        tensors |= {f"{block}.attn_{name}.weight": drawn(_WIDTH, _WIDTH) for name in ("q", "k", "v", "out")}
        tensors |= {f"{block}.ffn_up.weight": drawn(_INNER, _WIDTH), f"{block}.ffn_down.weight": drawn(_WIDTH, _INNER)}
    sizes = {"embedding_length": _WIDTH, "feed_forward_length": _INNER, "attention.head_count": _HEADS}
    write_vision(path, "janus_pro", tensors, size, image=SIDE, patch=_PATCH, blocks=layers, **sizes)


Message: TypeAlias = dict[str, Any]
_CLIENTS, _TOKENS, _TURNS = 8, 32, 10
_MEGAPIXEL = (1152, 864)
# SmolLM2's control tokens, which have no text: a server sends nothing for such a token, which would look like a gap.
_WITHOUT_TEXT = {str(token): -100 for token in range(17)}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a load. ``unit``: what it is. More is better, or less."""

    name: str
    unit: str
    value: float


@dataclass
class Stream:
    """When the tokens of an answer came, in seconds."""

    times: list[float] = field(default_factory=list)
    is_under_way: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self) -> None:
        """Note that a token came."""
        self.times.append(time.monotonic())
        if len(self.times) == 8:
            self.is_under_way.set()

    def gaps(self, began: float, ended: float) -> list[float]:
        """Return the seconds from one token to the next, of all gaps that touch a span."""
        return [after - before for before, after in pairwise(self.times) if after >= began and before <= ended]


class Client:
    """Talks to one server. The same ``seed`` makes the same loads."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: str) -> None:
        self._session, self._url, self._random = session, url, seeded(seed)

    async def new(self) -> list[Figure]:
        """Ask about sixteen pictures, each of which is new."""
        return [await self._rate("new", [self._question(self._picture()) for _ in range(16)])]

    async def again(self) -> list[Figure]:
        """Ask six things about each of four pictures."""
        pictures = [self._picture() for _ in range(4)]
        return [await self._rate("again", [self._question(picture) for _ in range(6) for picture in pictures])]

    async def elsewhere(self) -> list[Figure]:
        """Ask six things about each of four pictures, behind texts that differ."""
        pictures = [self._picture() for _ in range(4)]
        questions = [self._question(picture, text_first=True) for _ in range(6) for picture in pictures]
        return [await self._rate("elsewhere", questions)]

    async def talk(self) -> list[Figure]:
        """Hold a conversation with two pictures."""
        messages: list[Message] = []
        began = time.monotonic()
        for turn in range(_TURNS):
            messages.append(self._question(self._picture() if turn in (0, 3) else None))
            answer = "".join([text async for text in self._answer(messages)])
            messages.append({"role": "assistant", "content": answer})
        return [Figure("talk", "s", time.monotonic() - began)]

    async def beside(self) -> list[Figure]:
        """Ask about a large picture while four streams run; they end by being left."""
        running = [Stream() for _ in range(4)]
        streams = [asyncio.create_task(self._run(stream)) for stream in running]
        for stream in running:
            await stream.is_under_way.wait()
        began = time.monotonic()
        answer = self._answer([self._question(self._picture(_MEGAPIXEL))])
        await anext(answer)
        first_token = time.monotonic()
        async for _ in answer:
            pass
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        gaps = [gap for stream in running for gap in stream.gaps(began, first_token)]
        return [
            Figure("beside: longest gap", "ms", max(gaps) * 1e3),
            Figure("beside: median gap", "ms", median(gaps) * 1e3),
            Figure("beside: TTFT", "s", first_token - began),
        ]

    async def _rate(self, name: str, questions: list[Message]) -> Figure:
        waiting = iter(questions)

        async def client() -> None:
            for question in waiting:
                async for _ in self._answer([question]):
                    pass

        began = time.monotonic()
        await asyncio.gather(*(client() for _ in range(_CLIENTS)))
        return Figure(name, "answers/min", 60 * len(questions) / (time.monotonic() - began))

    def _question(self, picture: str | None, *, text_first: bool = False) -> Message:
        parts: list[Message] = [{"type": "text", "text": words(self._random, 20)}]
        if picture is not None:
            parts.insert(int(text_first), {"type": "image_url", "image_url": {"url": picture}})
        return {"role": "user", "content": parts}

    def _picture(self, size: tuple[int, int] = (512, 384)) -> str:
        return _picture(self._random, size)

    async def _run(self, stream: Stream) -> None:
        async for _ in self._answer([self._question(None)], {"max_tokens": 2000, "logit_bias": _WITHOUT_TEXT}):
            stream.note()

    async def _answer(self, messages: list[Message], fields: dict[str, Any] | None = None) -> AsyncIterator[str]:
        """Yield the text of each event of an answer."""
        body: dict[str, Any] = {"messages": messages, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, **(fields or {})}
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        if text := choice["delta"].get("content"):
                            yield text


def _picture(random: Random, size: tuple[int, int]) -> str:
    """Return a picture of large spots of colour as the URL of a JPEG."""
    spots = Image.frombytes("RGB", (16, 12), random.randbytes(3 * 16 * 12)).resize(size, Image.Resampling.BICUBIC)
    file = io.BytesIO()
    spots.save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


_LOADS: tuple[Callable[[Client], Awaitable[list[Figure]]], ...] = (
    Client.new,
    Client.again,
    Client.elsewhere,
    Client.talk,
    Client.beside,
)


async def _measure(urls: dict[Product, str], rounds: int, loads: list[str]) -> None:
    found: dict[tuple[str, str], list[dict[Product, float]]] = defaultdict(list)
    timeout = aiohttp.ClientTimeout(total=None)
    # llama-server closes connections between requests, and a request on such a one fails.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        for product, url in urls.items():  # Age each a little.
            await Client(session, url, f"age {product}").new()
        for number in range(rounds):
            order = list(urls) if number % 2 == 0 else list(urls)[::-1]
            for load in _LOADS:
                if loads and load.__name__ not in loads:
                    continue
                values: dict[tuple[str, str], dict[Product, float]] = defaultdict(dict)
                for product in order:
                    before = await _encodings(session, urls[product])
                    for figure in await load(Client(session, urls[product], f"{number} {load.__name__}")):
                        values[figure.name, figure.unit][product] = figure.value
                    encodings = await _encodings(session, urls[product]) - before
                    told = ", ".join(f"{name} {of[product]:.1f} {unit}" for (name, unit), of in values.items())
                    print(f"round {number + 1}, {product}: {told}, {encodings:.0f} encodings", flush=True)
                for key, of in values.items():
                    found[key].append(of)
    if len(urls) > 1:
        _compare(found, list(urls))


def _compare(found: dict[tuple[str, str], list[dict[Product, float]]], products: list[Product]) -> None:
    print(f"| load | {' | '.join(products)} | ratio |\n|---|---:|---:|---:|")
    for (name, unit), each in found.items():
        medians = [median(of[product] for of in each) for product in products]
        ratios = sorted(of[Product.CARAVAN] / of[Product.LLAMA_SERVER] for of in each)
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {name}, {unit} | {' | '.join(f'{value:.1f}' for value in medians)} | {spread} |")


async def _encodings(session: aiohttp.ClientSession, url: str) -> float:
    """Return how many pictures a router had encoded; 0 of llama-server, which does not tell."""
    async with session.get(f"{url}/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith("caravan_media_encodings_total"):
                return float(line.split()[-1])
    return 0.0


def main() -> None:
    """Start both servers, measure and print."""
    parser = argparse.ArgumentParser(
        prog="pictures", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--loads", nargs="*", default=[], help="all by default")
    parser.add_argument("--alone", action="store_true", help="Caravan alone, with no other server on the host")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        projector = Path(folder) / "mmproj.gguf"
        write_projector(projector, given.layers)
        common = Common(model=DEMO_MODEL, threads=given.threads)
        urls = {}
        for product in (Product.CARAVAN,) if given.alone else Product:
            contender = Contender(
                name="pictures", product=product, slots=8, cells=16_384, flags=("--mmproj", str(projector))
            )
            urls[product] = stack.enter_context(serving(contender, common)).url
        asyncio.run(_measure(urls, given.rounds, given.loads))


if __name__ == "__main__":
    main()
