"""Calls of every kind to one shard, with texts of 70 bytes to 500 KB."""

import asyncio
import itertools
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np

from caravan_proto.channel import client_options
from caravan_proto.messages.media import MediaKind, MediaShape, PromptPart, TextPart
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc, types_pb2
from caravan_proto.wire import MEDIA_SHAPE, encode_parts
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service.server import ShardServer
from caravan_testing.projectors import write_varying_projector
from caravan_testing.shard_harness import RunningShard, prompt_chunk
from caravan_testing.shard_models import DEMO_MODEL, fetched
from caravan_testing.shard_tiny_bert import TinyBert
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama
from stops.tally import PAUSE_S, Stopped, Tally, faults_in

_SIZES = (70, 3_000, 30_000)
_SLOW_EVERY = 20
_FLAGS = ("-np", "4", "-c", "2048", "-t", "1")


@dataclass(frozen=True, slots=True)
class StoppedModel:
    """A model and the flags of its shard. One that ``generates`` also embeds and sees, the others embed only.

    ``longest``: tokens of a text to embed. ``slow``: it takes 20 s for the largest text to tokenize.
    """

    name: str
    file: Path
    flags: Sequence[str]
    generates: bool
    longest: int
    slow: bool = False

    def sizes(self, number: int) -> Sequence[int]:
        """Return the bytes of the texts to tokenize in the stop of this ``number``.

        A slow model gets the largest one in a few stops only, whose shards end while it is still tokenized.
        """
        return (*_SIZES, 100_000 if self.slow and number % _SLOW_EVERY else 500_000)


def write_models(folder: Path) -> list[StoppedModel]:
    """Return the demo model, whose tokenizer is a regular expression and a byte-pair encoding, and two small ones."""
    demo, tiny = fetched(DEMO_MODEL), write_tiny_llama(folder / "tiny.gguf", Shape(context=2048))
    for name, size in (("demo", 576), ("tiny", 64)):
        write_varying_projector(folder / f"mmproj-{name}.gguf", size)

    def flags(name: str) -> tuple[str, ...]:
        return (*_FLAGS, "--embeddings", "--mmproj", str(folder / f"mmproj-{name}.gguf"))

    encoder = TinyBert().write(folder / "encoder.gguf")
    return [
        StoppedModel("demo", demo, flags("demo"), generates=True, longest=256),
        StoppedModel("tiny", tiny, flags("tiny"), generates=True, longest=256, slow=True),
        StoppedModel("encoder", encoder, ("-t", "1"), generates=False, longest=100),
    ]


_WORDS = ("river", "the", "of", "Paris", "bread's", "42", "naïve", "  ", "\n", "東京", "x=y;", "Ünder", "🙂", "don't")
_SEQUENCES = 2
_PROMPT_TOKENS = 60
_STEPS = 12

Call = Callable[[], Awaitable[object]]


class Callers:
    """Calls a shard again and again. ``leased``: also with commands, for which `RunningShard.take` was called."""

    def __init__(self, shard: RunningShard, model: StoppedModel, seed: int, *, leased: bool) -> None:
        self._shard = shard
        self._model = model
        self._random = random.Random(seed)
        self._numbers = itertools.count(seed << 20)
        self._calls: list[tuple[str, Call]] = [
            *(("Tokenize", self._tokenizer(size)) for size in model.sizes(seed)),
            ("TokenizeTexts", self._tokenize_texts),
            ("Detokenize", self._detokenize),
            ("Embed", self._embed),
        ]
        if model.generates:
            self._calls += [
                ("TokenizeParts", self._tokenize_parts),
                ("EncodeMedia", self._encode_media),
                ("CompileConstraint", self._compile),
            ]
        else:
            self._calls.append(("TokenizeTexts of pairs", self._tokenize_pairs))
        self._is_leased = leased and model.generates

    @property
    def kinds(self) -> set[str]:
        """The kinds of calls that are made."""
        return {kind for kind, _ in self._calls} | (_COMMANDS if self._is_leased else set())

    async def run(self, tally: Tally) -> None:
        """Call until the shard's port is closed."""
        async with asyncio.TaskGroup() as tasks:
            for kind, call in self._calls:
                tasks.create_task(tally.repeat(kind, call))
            if self._is_leased:
                for sequence_id in range(_SEQUENCES):
                    tasks.create_task(self._run_sequence(tally, sequence_id))

    def _text(self, size: int) -> str:
        words = self._random.choices(_WORDS, k=size // 8 + 10)
        return " ".join(words).encode()[:size].decode(errors="ignore")

    def _tokenizer(self, size: int) -> Call:
        text = self._text(size)
        return lambda: self._shard.stub.Tokenize(shard_pb2.TokenizeRequest(text=text, add_special=True))

    def _tokenize_texts(self) -> Awaitable[object]:
        texts = [self._text(4_000) for _ in range(20)]
        return self._shard.stub.TokenizeTexts(shard_pb2.TokenizeTextsRequest(texts=texts))  # type: ignore[no-any-return]

    def _tokenize_pairs(self) -> Awaitable[object]:
        texts = [self._text(1_000) for _ in range(10)]
        request = shard_pb2.TokenizeTextsRequest(texts=texts, documents=texts)
        return self._shard.stub.TokenizeTexts(request)  # type: ignore[no-any-return]

    def _detokenize(self) -> Awaitable[object]:
        request = shard_pb2.DetokenizeRequest(token_ids=self._random.choices(range(3, 60), k=20_000))
        return self._shard.stub.Detokenize(request)  # type: ignore[no-any-return]

    def _embed(self) -> Awaitable[object]:
        counts = [self._random.randrange(1, self._model.longest) for _ in range(3)]
        tokens = self._random.choices(range(3, 60), k=sum(counts))
        return self._shard.stub.Embed(shard_pb2.EmbedRequest(token_ids=tokens, counts=counts))  # type: ignore[no-any-return]

    def _picture(self) -> MediaShape:
        width, height = self._random.randrange(20, 300), self._random.randrange(20, 300)
        media_id = next(self._numbers).to_bytes(8, "little")
        return MediaShape(media_id=media_id, kind=MediaKind.IMAGE, width=width, height=height)

    def _tokenize_parts(self) -> Awaitable[object]:
        parts: list[PromptPart] = [TextPart(self._text(3_000)), self._picture(), TextPart(self._text(30_000))]
        return self._shard.stub.TokenizeParts(encode_parts(parts))  # type: ignore[no-any-return]

    def _encode_media(self) -> Awaitable[object]:
        shape = self._picture()
        pixels = np.random.default_rng(next(self._numbers)).integers(0, 256, shape.width * shape.height * 3, np.uint8)
        request = shard_pb2.EncodeMediaRequest(shape=MEDIA_SHAPE.encode(shape), data=pixels.tobytes())
        return self._shard.stub.EncodeMedia(request)  # type: ignore[no-any-return]

    def _constraint(self) -> types_pb2.Constraint:
        return types_pb2.Constraint(regex=f"[a-z {next(self._numbers)}]{{20,200}}")

    def _compile(self) -> Awaitable[object]:
        request = shard_pb2.CompileConstraintRequest(constraint=self._constraint())
        return self._shard.stub.CompileConstraint(request)  # type: ignore[no-any-return]

    async def _run_sequence(self, tally: Tally, sequence_id: int) -> None:
        """Prefill, decode, save and load a sequence, again and again; every other one has a constraint."""
        end = "answered"
        while end in ("answered", "refused"):
            for kind, command in self._commands(sequence_id):
                end = await tally.once(kind, command)
                if end != "answered":
                    await asyncio.sleep(PAUSE_S)
                    break

    def _commands(self, sequence_id: int) -> list[tuple[str, Call]]:
        shard, number = self._shard, next(self._numbers)
        prompt = self._random.choices(range(3, 60), k=_PROMPT_TOKENS)
        chunk = prompt_chunk(sequence_id, prompt, max_new=10 * _STEPS, ignore_eos=True)
        if number % 2:
            chunk.parameters.constraint.CopyFrom(self._constraint())
        key = number.to_bytes(16, "little")
        save = shard_pb2.SaveEntry(sequence_id=sequence_id, cuts=[_PROMPT_TOKENS], keys=[key], release=True)
        piece = shard_pb2.RunSlice(key=key, start=0, end=_PROMPT_TOKENS)
        load = shard_pb2.LoadEntry(sequence_id=sequence_id, token_ids=prompt, slices=[piece])
        return [
            ("Prefill", lambda: shard.prefill(chunk)),
            ("Decode", lambda: _all_of(shard, sequence_id)),
            ("Save", lambda: shard.save(save)),
            ("Load", lambda: shard.load(load)),
            ("Save", lambda: shard.save(save)),
        ]


_COMMANDS = {"Prefill", "Decode", "Save", "Load"}


async def _all_of(shard: RunningShard, sequence_id: int) -> None:
    async for _ in shard.decode([sequence_id], _STEPS):
        pass


# Running sequences have so long to end. The callers never give their lease back, so that calls run until the end.
DRAIN_S = 0.3
_START_S = 120.0
# A process that has not ended by then hangs, however busy the host is.
HANGS_S = 150.0
# So many stops do not wait until calls of all kinds have been answered.
_EARLY_SHARE = 0.1
_LONGEST_PAUSE_S = 0.6


async def stop_directly(way: str, model: StoppedModel, folder: Path, seed: int) -> Stopped:
    """Start a shard of ``model``, call it, and stop it by ``sigterm`` or ``drain`` in the midst of calls."""
    stopped, chance, tally = Stopped(way, model.name), random.Random(seed), Tally()
    address, log = f"unix:{folder / f'{seed}.sock'}", folder / f"{seed}.log"
    command = (sys.executable, "-m", "caravan_shard", "--address", address, "--model", str(model.file), *model.flags)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, "--drain-timeout-s", str(DRAIN_S), stdout=output, stderr=output
        )
    try:
        async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
            async with asyncio.timeout(_START_S):
                await channel.channel_ready()
            stub = shard_pb2_grpc.ShardServiceStub(channel)
            server = ShardServer(ShardConfig(backend="fake", address=address))
            shard = RunningShard(server, ToyBackend(), address, channel, stub)
            await shard.take()
            callers = Callers(shard, model, seed, leased=True)
            calling = asyncio.create_task(callers.run(tally))
            async with asyncio.timeout(_START_S):
                await tally.until_answered(callers.kinds if chance.random() > _EARLY_SHARE else set())
            await asyncio.sleep(chance.uniform(0, _LONGEST_PAUSE_S))
            tally.has_begun_to_end, began = True, time.monotonic()
            if way == "sigterm":
                process.send_signal(signal.SIGTERM)
            else:
                await shard.stub.Drain(shard_pb2.DrainRequest(epoch=shard.epoch))
            async with asyncio.timeout(HANGS_S):
                code = await process.wait()
                stopped.seconds = time.monotonic() - began
                await calling
    except TimeoutError:
        stopped.problems.append("it hangs")
        code = None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    stopped.exit_name = _exit_name(code)
    stopped.ends = tally.ends
    stopped.problems += [*tally.problems, *faults_in(await asyncio.to_thread(log.read_text))]
    if code != 0:
        stopped.problems.append(f"exit status {stopped.exit_name}")
    return stopped


def _exit_name(code: int | None) -> str:
    if code is None:
        return "none"
    return signal.Signals(-code).name if code < 0 else str(code)
