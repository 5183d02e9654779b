"""A shard with a projector, over gRPC, as a router sees it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from caravan_proto.channel import client_options
from caravan_proto.messages.media import MediaKind, MediaShape, TextPart
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc, types_pb2
from caravan_proto.wire import CHUNK, ENCODED_MEDIA, INFO, MEDIA_SHAPE, TOKENIZED_PARTS, encode_parts
from caravan_shard.config import ShardConfig
from caravan_shard.media import EncodingError
from caravan_shard.service.server import ShardServer
from caravan_testing.media_prompts import MediaPrompt
from caravan_testing.projectors import CELLS, PATCH, SIDE, Speller, write_spelling_projector
from caravan_testing.shard_harness import RunningShard, prompt_chunk
from caravan_testing.shard_tiny_llama import write_tiny_llama

# grpc.aio works only on the event loop on which it was first used.
pytestmark = pytest.mark.asyncio(loop_scope="session")

_TOKENS = range(3, 259)
_SPELLED = range(70, 70 + CELLS)
_SHAPE = MediaShape(media_id=b"picture", kind=MediaKind.IMAGE, width=SIDE * PATCH, height=SIDE * PATCH)


@pytest_asyncio.fixture(loop_scope="session")
async def shard(tmp_path: Path) -> AsyncIterator[tuple[RunningShard, Speller]]:
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    speller = write_spelling_projector(tmp_path / "mmproj.gguf", model, _TOKENS)
    address = f"unix:{tmp_path / 'shard'}"
    config = ShardConfig(model=str(model), address=address, threads=1, ctx_size=2048, parallel=2, flash_attn="on")
    server = ShardServer(config)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
            stub = shard_pb2_grpc.ShardServiceStub(channel)
            running = RunningShard(server, server._shard.engine.backend, address, channel, stub)  # type: ignore[arg-type]
            await running.take()
            yield running, speller
    finally:
        await server.stop()


async def _output(shard: RunningShard, chunk: types_pb2.PrefillChunk) -> list[int]:
    response = await shard.prefill(chunk)
    assert response.outcome == types_pb2.STEP_OUTCOME_OK
    rest = [token async for step in shard.steps([0]) for token in step.tokens.token_ids]
    await shard.keep()
    return [*response.tokens.token_ids, *rest]


async def test_a_picture_travels_as_a_router_sends_it(shard: tuple[RunningShard, Speller]) -> None:
    running, speller = shard
    facts = INFO.decode(await running.stub.Info(shard_pb2.InfoRequest())).model.media
    assert facts is not None
    assert (facts.images, facts.audio, facts.atomic, facts.max_cells) == (True, False, False, CELLS)
    parts = encode_parts([TextPart("What is ", True, True), _SHAPE, TextPart(" here?", parse_special=True)])
    read = TOKENIZED_PARTS.decode(await running.stub.TokenizeParts(parts))
    data = speller.picture(_SPELLED).tobytes()
    request = shard_pb2.EncodeMediaRequest(shape=MEDIA_SHAPE.encode(_SHAPE), data=data)
    assert ENCODED_MEDIA.decode(await running.stub.EncodeMedia(request)).cells == (CELLS,)
    prompt = MediaPrompt(read.token_ids, read.media)
    chunk = prompt_chunk(0, prompt.token_ids, max_new=12)
    chunk.media.extend(CHUNK.encode(prompt.first_chunk(0)).media)
    (span,) = read.media
    words = [*read.token_ids[: span.offset], *_SPELLED, *read.token_ids[span.end :]]
    assert await _output(running, chunk) == await _output(running, prompt_chunk(0, words, max_new=12))


async def test_closing_waits_for_an_encoding(shard: tuple[RunningShard, Speller]) -> None:
    running, speller = shard
    encoder = running.backend.media
    assert encoder is not None
    data = speller.picture(_SPELLED).tobytes()
    failed = threading.Event()

    def encode() -> None:
        try:
            while True:
                encoder.encode(_SHAPE, data)
                encoder.tokenize(_SHAPE)
        except EncodingError:
            failed.set()

    encoding = asyncio.get_running_loop().run_in_executor(None, encode)
    await asyncio.sleep(0)
    await running.server._shard.stop_worker()
    await encoding
    assert failed.is_set()
