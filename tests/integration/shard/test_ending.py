"""A shard that ends: it refuses calls, answers those that use the model, then frees it and closes its port."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from caravan_proto.channel import client_options
from caravan_proto.errors import ShardError
from caravan_proto.messages.media import MediaShape, TextPart
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc, types_pb2
from caravan_proto.wire import MEDIA_SHAPE, encode_parts
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.media import ToyEncoder
from caravan_shard.media import EncodedSlice
from caravan_testing.media_prompts import toy_picture
from caravan_testing.shard_harness import RunningShard, prompt_chunk, refused, running_shard
from caravan_testing.waiting import DEADLINE_S

# grpc.aio works only on the event loop on which it was first used.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PICTURE = toy_picture("a red ball")


class Gate:
    """Holds the threads that come to it, and notes that they came and left."""

    def __init__(self) -> None:
        self.came, self.may_go = threading.Event(), threading.Event()
        self.inside = 0

    def __enter__(self) -> None:
        self.inside += 1
        self.came.set()
        assert self.may_go.wait(DEADLINE_S)

    def __exit__(self, *_error: object) -> None:
        self.inside -= 1


class HeldEncoder(ToyEncoder):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def encode(self, shape: MediaShape, data: bytes) -> Sequence[EncodedSlice]:
        with self.gate:
            return super().encode(shape, data)


class HeldBackend(ToyBackend):
    """A toy whose vocabulary and encoder are held at a gate, and which must not be freed while they are used."""

    def __init__(self) -> None:
        self.gate = Gate()
        super().__init__(media=HeldEncoder(self.gate), embedding_size=8)
        self.was_used_when_freed: bool | None = None
        vocabulary, gate = self.vocabulary, self.gate

        def held(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            with gate:
                return type(vocabulary).tokenize(vocabulary, text, add_special=add_special, parse_special=parse_special)

        vocabulary.tokenize = held  # type: ignore[method-assign]

    def close(self) -> None:
        super().close()
        self.was_used_when_freed = self.gate.inside > 0


Call = Callable[[RunningShard], Any]
TEXT = shard_pb2.TokenizeRequest(text="abc")
USES: dict[str, Call] = {
    "Tokenize": lambda shard: shard.stub.Tokenize(TEXT),
    "TokenizeTexts": lambda shard: shard.stub.TokenizeTexts(shard_pb2.TokenizeTextsRequest(texts=["abc"])),
    "TokenizeParts": lambda shard: shard.stub.TokenizeParts(encode_parts([TextPart("abc")])),
    "EncodeMedia": lambda shard: shard.stub.EncodeMedia(
        shard_pb2.EncodeMediaRequest(shape=MEDIA_SHAPE.encode(PICTURE.shape), data=PICTURE.data)
    ),
}
REGEX = types_pb2.Constraint(regex="[xyz]{5}")
OTHERS: dict[str, Call] = {
    "TokenizeTexts of pairs": lambda shard: shard.stub.TokenizeTexts(
        shard_pb2.TokenizeTextsRequest(texts=["abc"], documents=["abc"])
    ),
    "Detokenize": lambda shard: shard.stub.Detokenize(shard_pb2.DetokenizeRequest(token_ids=[65])),
    "Embed": lambda shard: shard.stub.Embed(shard_pb2.EmbedRequest(token_ids=[65], counts=[1])),
    "CompileConstraint": lambda shard: shard.stub.CompileConstraint(
        shard_pb2.CompileConstraintRequest(constraint=REGEX)
    ),
    "Prefill": lambda shard: shard.prefill(prompt_chunk(0, b"abc")),
    "Prefill with a constraint": lambda shard: shard.prefill(_constrained()),
    "Save": lambda shard: shard.save(),
    "Load": lambda shard: shard.load(),
    "FetchRuns": lambda shard: shard.stub.FetchRuns(shard_pb2.FetchRunsRequest(epoch=shard.epoch)),
}


def _constrained() -> types_pb2.PrefillChunk:
    chunk = prompt_chunk(0, b"abc")
    chunk.parameters.constraint.CopyFrom(REGEX)
    return chunk


@asynccontextmanager
async def ending_shard(used_by: Call) -> AsyncIterator[tuple[RunningShard, HeldBackend, "asyncio.Task[bool]"]]:
    """Yield a shard that ends while a call uses its model, and the end."""
    backend = HeldBackend()
    async with running_shard(backend) as shard:
        await shard.take()
        using = asyncio.ensure_future(_awaited(used_by(shard)))
        assert await asyncio.to_thread(backend.gate.came.wait, DEADLINE_S)
        ending = asyncio.create_task(shard.server.stop())
        try:
            # It has begun to end as soon as it refuses.
            assert await _first_refusal(shard) is ShardError.DRAINING
            yield shard, backend, ending
            assert not ending.done()
            backend.gate.may_go.set()
            await using
            assert await ending
            assert backend.was_used_when_freed is False
        finally:
            backend.gate.may_go.set()
            await asyncio.wait({using, ending})


async def _awaited(call: Any) -> object:
    return await call


async def _first_refusal(shard: RunningShard) -> ShardError | None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await shard.stub.Detokenize(shard_pb2.DetokenizeRequest(token_ids=[65]))
            except grpc.aio.AioRpcError:
                return await refused(shard.stub.Detokenize(shard_pb2.DetokenizeRequest(token_ids=[65])))


@pytest.mark.parametrize("use", USES)
async def test_a_call_that_uses_the_model_is_answered_before_the_model_is_freed(use: str) -> None:
    async with ending_shard(USES[use]) as (_shard, backend, _ending):
        assert backend.was_used_when_freed is None


async def test_each_call_to_a_shard_that_ends_is_refused_as_one_that_drains() -> None:
    async with ending_shard(USES["Tokenize"]) as (shard, _backend, _ending):
        for name, call in {**USES, **OTHERS}.items():
            assert await refused(call(shard)) is ShardError.DRAINING, name
        assert await refused(anext(aiter(shard.decode([0])))) is ShardError.DRAINING


async def test_a_thread_whose_caller_has_gone_keeps_the_model() -> None:
    backend = HeldBackend()
    async with running_shard(backend) as shard:
        call = shard.stub.Tokenize(TEXT)
        assert await asyncio.to_thread(backend.gate.came.wait, DEADLINE_S)
        call.cancel()
        ending = asyncio.create_task(shard.server.stop())
        assert await _first_refusal(shard) is ShardError.DRAINING
        assert backend.was_used_when_freed is None
        backend.gate.may_go.set()
        assert await ending
        assert backend.was_used_when_freed is False


# A shard whose text threads never end.
STUCK = """
import sys, threading
from caravan_shard import cli
from caravan_shard.backends.toy.model import ToyVocabulary
from caravan_shard.service import loaded_shard
loaded_shard.STOP_S = 0.2
def stick(*_arguments, **_options):
    print("stuck", flush=True)
    threading.Event().wait()
ToyVocabulary.tokenize = stick
sys.exit(cli.main(["--backend", "fake", "--address", sys.argv[1]]))
"""


async def test_a_process_ends_with_status_0_though_something_uses_the_model_for_ever(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'shard'}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUCK, address, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S), grpc.aio.insecure_channel(address, options=client_options()) as channel:
            await channel.channel_ready()
            call = shard_pb2_grpc.ShardServiceStub(channel).Tokenize(TEXT)
            assert await process.stdout.readline() == b"stuck\n"
            process.terminate()
            with pytest.raises(grpc.aio.AioRpcError):
                await call
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    assert b"exits without freeing the model" in said
