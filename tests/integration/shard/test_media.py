"""Pictures and sound, which spell text, and vectors over gRPC, on the toy backend."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from caravan_proto.errors import ShardError
from caravan_proto.limits import MAX_MEDIA_BYTES
from caravan_proto.messages.media import EncodedMedia, MediaShape, PromptPart, TextPart, TokenizedParts
from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_proto.wire import CHUNK, ENCODED_MEDIA, INFO, MEDIA_SHAPE, TOKENIZED_PARTS, encode_parts
from caravan_shard.arrays import Floats
from caravan_shard.backends.toy.backend import ToyBackend, toy_embedding
from caravan_shard.backends.toy.media import SLICE_CELLS, ToyEncoder
from caravan_shard.backends.toy.model import BOS, EOS, TURN_START
from caravan_testing.media_prompts import MediaPrompt, Medium, toy_picture, toy_sound
from caravan_testing.shard_harness import RunningShard, error_code, prompt_chunk, running_shard
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import DEADLINE_S, eventually

# grpc.aio works only on the event loop on which it was first used.
pytestmark = pytest.mark.asyncio(loop_scope="session")

_PICTURE, _SOUND = toy_picture("a red ball"), toy_sound("tick tock")
_TEXT = "see a red ball hear tick tock ok"


def _parts(*parts: str | Medium) -> list[PromptPart]:
    return [part.shape if isinstance(part, Medium) else TextPart(part) for part in parts]


_PARTS = _parts("see ", _PICTURE, " hear ", _SOUND, " ok")


@pytest_asyncio.fixture(loop_scope="session")
async def shard() -> AsyncIterator[RunningShard]:
    async with running_shard(ToyBackend(media=ToyEncoder())) as shard:
        await shard.take()
        yield shard


async def _tokenize(shard: RunningShard, parts: Sequence[PromptPart]) -> TokenizedParts:
    return TOKENIZED_PARTS.decode(await shard.stub.TokenizeParts(encode_parts(parts)))


async def _encode(shard: RunningShard, medium: Medium) -> EncodedMedia:
    request = shard_pb2.EncodeMediaRequest(shape=MEDIA_SHAPE.encode(medium.shape), data=medium.data)
    return ENCODED_MEDIA.decode(await shard.stub.EncodeMedia(request))


async def _refused(call: Any) -> ShardError | None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_code(caught.value)


def _chunk(prompt: MediaPrompt) -> types_pb2.PrefillChunk:
    plain = prompt_chunk(0, prompt.token_ids, max_new=20)
    plain.media.extend(CHUNK.encode(prompt.first_chunk(0)).media)
    return plain


async def _output(shard: RunningShard, response: shard_pb2.PrefillResponse) -> list[int]:
    first = list(response.tokens.token_ids)
    return first + [token async for step in shard.steps([0]) for token in step.tokens.token_ids]


async def test_a_prompt_with_media_has_the_output_of_its_text(shard: RunningShard) -> None:
    read = await _tokenize(shard, _PARTS)
    encoded = await _encode(shard, _PICTURE)
    assert encoded.cells == (10,)
    assert encoded.seconds > 0
    await _encode(shard, _SOUND)
    response = await shard.prefill(_chunk(MediaPrompt(read.token_ids, read.media)))
    assert response.outcome == types_pb2.STEP_OUTCOME_OK
    assert await _output(shard, response) == expected_output(list(_TEXT.encode()), 20)


async def test_parts_are_cells_in_their_order(shard: RunningShard) -> None:
    read = await _tokenize(shard, [TextPart("<s>", parse_special=False), *_PARTS, TextPart("<|im_start|>", True, True)])
    assert len(read.token_ids) == len(read.pieces) == len(read.specials) == 3 + len(_TEXT) + 2
    assert list(read.token_ids[-2:]) == [BOS, TURN_START]
    first, second = read.media
    assert (first.offset, first.count, first.media_id) == (7, 10, _PICTURE.shape.media_id)
    assert (second.offset, second.count, second.media_id) == (23, 9, _SOUND.shape.media_id)
    for span in read.media:
        assert set(read.token_ids[span.offset : span.end]) == {0}
        assert set(read.pieces[span.offset : span.end]) == {b""}
        assert set(read.specials[span.offset : span.end]) == {True}
    assert b"".join(read.pieces) == b"<s>see  hear  ok<s><|im_start|>"


async def test_a_large_picture_has_slices(shard: RunningShard) -> None:
    text = "x" * (2 * SLICE_CELLS + 3)
    picture = toy_picture(text)
    read = await _tokenize(shard, _parts(picture))
    assert [(span.slice_index, span.count) for span in read.media] == [(0, SLICE_CELLS), (1, SLICE_CELLS), (2, 3)]
    assert (await _encode(shard, picture)).cells == (SLICE_CELLS, SLICE_CELLS, 3)
    response = await shard.prefill(_chunk(MediaPrompt(read.token_ids, read.media)))
    assert await _output(shard, response) == expected_output(list(text.encode()), 20)


async def test_a_step_without_its_media_says_which_are_missing(shard: RunningShard) -> None:
    read = await _tokenize(shard, _PARTS)
    chunk = _chunk(MediaPrompt(read.token_ids, read.media))
    await _encode(shard, _SOUND)
    response = await shard.prefill(chunk)
    assert response.outcome == types_pb2.STEP_OUTCOME_MEDIA_MISSING
    assert list(response.missing_media_ids) == [_PICTURE.shape.media_id]
    assert list((await shard.keep()).sequence_ids) == []
    await _encode(shard, _PICTURE)
    assert (await shard.prefill(chunk)).outcome == types_pb2.STEP_OUTCOME_OK


async def test_a_medium_is_encoded_once(shard: RunningShard) -> None:
    encoder = shard.backend.media
    assert isinstance(encoder, ToyEncoder)
    await asyncio.gather(*(_encode(shard, _PICTURE) for _ in range(4)))
    assert (await _encode(shard, _PICTURE)).seconds == 0
    assert encoder.count == 1


async def test_steps_go_on_beside_an_encoding() -> None:
    async with running_shard(ToyBackend(media=ToyEncoder(seconds=30.0))) as shard:
        await shard.take()
        encoding = asyncio.ensure_future(_encode(shard, _PICTURE))
        response = await shard.prefill(prompt_chunk(0, b"hello", max_new=20))
        assert await _output(shard, response) == expected_output(list(b"hello"), 20)
        assert list((await _tokenize(shard, _PARTS)).token_ids[:4]) == list(b"see ")
        assert not encoding.done()
        shard.backend.media.stop()  # type: ignore[union-attr]
        assert (await encoding).cells == (10,)


async def test_info_tells_what_the_model_takes(shard: RunningShard) -> None:
    facts = INFO.decode(await shard.stub.Info(shard_pb2.InfoRequest())).model.media
    assert facts == ToyEncoder().facts
    async with running_shard(ToyBackend()) as blind:
        assert INFO.decode(await blind.stub.Info(shard_pb2.InfoRequest())).model.media is None
        assert await _refused(_tokenize(blind, _PARTS)) is ShardError.BAD_REQUEST
        assert await _refused(_encode(blind, _PICTURE)) is ShardError.BAD_REQUEST
        await blind.take()
        read = await _tokenize(shard, _PARTS)
        refused = blind.prefill(_chunk(MediaPrompt(read.token_ids, read.media)))
        assert await _refused(refused) is ShardError.BAD_REQUEST


def _image(**fields: Any) -> MediaShape:
    return MEDIA_SHAPE.decode(
        shard_pb2.MediaShape(
            **{"media_id": b"i", "kind": shard_pb2.MEDIA_KIND_IMAGE, "width": 4, "height": 4, **fields}
        )
    )


_SHAPES = {
    "no id": (_image(media_id=b""), ShardError.BAD_REQUEST),
    "a long id": (_image(media_id=b"x" * 65), ShardError.BAD_REQUEST),
    "an unknown kind": (_image(kind=7), ShardError.BAD_REQUEST),
    "no width": (_image(width=0), ShardError.MEDIA_TOO_LARGE),
    "one pixel": (_image(height=1), ShardError.MEDIA_TOO_LARGE),
    "a side beyond all": (_image(width=2**32 - 1), ShardError.MEDIA_TOO_LARGE),
    "too many pixels": (_image(width=4096, height=4096), ShardError.MEDIA_TOO_LARGE),
    "no samples": (_image(kind=shard_pb2.MEDIA_KIND_AUDIO), ShardError.MEDIA_TOO_LARGE),
    "too many samples": (_image(kind=shard_pb2.MEDIA_KIND_AUDIO, samples=2**32 - 1), ShardError.MEDIA_TOO_LARGE),
}


@pytest.mark.parametrize("name", _SHAPES)
async def test_media_out_of_range_are_refused(shard: RunningShard, name: str) -> None:
    shape, error = _SHAPES[name]
    assert await _refused(_tokenize(shard, [shape])) is error
    assert await _refused(_encode(shard, Medium(shape, b"x"))) is error


@pytest.mark.parametrize("size", [0, 1, 47, 49, 4 * 4 * 3 * 2])
async def test_content_of_another_size_is_refused(shard: RunningShard, size: int) -> None:
    assert await _refused(_encode(shard, Medium(_image(), b"x" * size))) is ShardError.BAD_REQUEST
    assert MAX_MEDIA_BYTES < 16 << 20


async def test_a_part_of_neither_kind_is_refused(shard: RunningShard) -> None:
    request = shard_pb2.TokenizePartsRequest(parts=[shard_pb2.PromptPart()])
    assert await _refused(shard.stub.TokenizeParts(request)) is ShardError.BAD_REQUEST


_SPANS: dict[str, tuple[dict[str, Any], ShardError]] = {
    "beyond the tokens": ({"offset": 5, "count": 10}, ShardError.BAD_REQUEST),
    "over words": ({"offset": 0}, ShardError.BAD_REQUEST),
    "of no cells": ({"count": 0, "positions": 0}, ShardError.BAD_REQUEST),
    "of a slice that is not": ({"slice_index": 1}, ShardError.BAD_REQUEST),
    "beyond the slice": ({"first": 1}, ShardError.BAD_REQUEST),
    "far beyond the slice": ({"first": 2**32 - 1}, ShardError.BAD_REQUEST),
    "with other positions": ({"positions": 9}, ShardError.BAD_REQUEST),
    "without an id": ({"media_id": b""}, ShardError.BAD_REQUEST),
}


@pytest.mark.parametrize("name", _SPANS)
async def test_spans_out_of_range_are_refused(shard: RunningShard, name: str) -> None:
    await _encode(shard, _PICTURE)
    fields, error = _SPANS[name]
    chunk = prompt_chunk(0, [*b"see ", *[0] * 10], max_new=4)
    whole: dict[str, Any] = {"offset": 4, "media_id": _PICTURE.shape.media_id, "count": 10, "positions": 10}
    chunk.media.add(**{**whole, **fields})
    assert await _refused(shard.prefill(chunk)) is error


async def test_spans_that_overlap_are_refused(shard: RunningShard) -> None:
    await _encode(shard, _PICTURE)
    chunk = prompt_chunk(0, [0] * 16, max_new=4)
    for offset in (0, 6):
        chunk.media.add(offset=offset, media_id=_PICTURE.shape.media_id, count=10, positions=10)
    assert await _refused(shard.prefill(chunk)) is ShardError.BAD_REQUEST


SIZE = 16
TEXTS = [b"a text", b"another one", b"x"]


def request(*texts: Sequence[int]) -> shard_pb2.EmbedRequest:
    return shard_pb2.EmbedRequest(
        token_ids=[token for text in texts for token in text], counts=[len(text) for text in texts]
    )


def vectors(response: shard_pb2.EmbedResponse) -> Any:
    return np.array(response.values, np.float32).reshape(-1, SIZE)


async def embed(shard: RunningShard, *texts: Sequence[int]) -> Any:
    return vectors(await shard.stub.Embed(request(*texts)))


async def test_texts_have_vectors_without_a_lease() -> None:
    async with running_shard(ToyBackend(embedding_size=SIZE)) as shard:
        limits = (await shard.stub.Info(shard_pb2.InfoRequest())).limits
        assert (limits.embedding_size, limits.max_embed_tokens, limits.embed_tokens_at_once) == (SIZE, 512, 512)
        made = await embed(shard, *TEXTS)
        np.testing.assert_array_equal(made, [toy_embedding(text, SIZE) for text in TEXTS])
        np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-6)
        np.testing.assert_array_equal(await embed(shard, TEXTS[1]), made[1:2])
        assert len(await embed(shard)) == 0


async def test_a_model_that_ranks_returns_a_number_for_each_pair() -> None:
    async with running_shard(ToyBackend(ranks=True)) as shard:
        limits = (await shard.stub.Info(shard_pb2.InfoRequest())).limits
        assert (limits.ranks, limits.embedding_size, limits.max_embed_tokens) == (True, 0, 512)
        pairs = [[BOS, *b"abc", EOS, *document] for document in (b"ab", b"axyz", b"")]
        together = shard_pb2.TokenizeTextsRequest(texts=["abc"] * 3, documents=["ab", "axyz", ""])
        found = await shard.stub.TokenizeTexts(together)
        assert list(found.counts) == [len(pair) for pair in pairs]
        assert list(found.token_ids) == [token for pair in pairs for token in pair]
        assert list((await shard.stub.Embed(request(*pairs))).values) == [1.0, 0.25, 0.0]
        for texts, documents, error in (
            (["a" * limits.max_tokenize_bytes], ["b"], ShardError.TEXT_TOO_LONG),
            (["a", "b"], ["c"], ShardError.BAD_REQUEST),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await shard.stub.TokenizeTexts(shard_pb2.TokenizeTextsRequest(texts=texts, documents=documents))
            assert error_code(caught.value) is error


async def test_texts_are_tokenized_together_as_each_alone() -> None:
    async with running_shard(ToyBackend(embedding_size=SIZE)) as shard:
        limit = (await shard.stub.Info(shard_pb2.InfoRequest())).limits.max_tokenize_bytes
        texts = ["abc", "", "d", "e" * (limit - 4)]
        for special in (True, False):
            together = shard_pb2.TokenizeTextsRequest(texts=texts, add_special=special, parse_special=special)
            found = await shard.stub.TokenizeTexts(together)
            alone = [
                await shard.stub.Tokenize(
                    shard_pb2.TokenizeRequest(text=text, add_special=special, parse_special=special)
                )
                for text in texts
            ]
            assert list(found.counts) == [len(one.token_ids) for one in alone]
            assert list(found.token_ids) == [token for one in alone for token in one.token_ids]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await shard.stub.TokenizeTexts(shard_pb2.TokenizeTextsRequest(texts=[*texts, "f"]))
        assert error_code(caught.value) is ShardError.TEXT_TOO_LONG


BAD_REQUESTS = {
    "a text of no tokens": (request(b"a", b"", b"b"), ShardError.BAD_REQUEST),
    "counts below the tokens": (shard_pb2.EmbedRequest(token_ids=[1, 2, 3], counts=[2]), ShardError.BAD_REQUEST),
    "counts above the tokens": (shard_pb2.EmbedRequest(token_ids=[1], counts=[2**32 - 1]), ShardError.BAD_REQUEST),
    "a token outside the vocabulary": (request([1, 260]), ShardError.BAD_REQUEST),
    "too many texts": (request(*[b"a"] * 257), ShardError.BAD_REQUEST),
    "a text too long": (request(b"a", b"b" * 513), ShardError.SEQUENCE_TOO_LONG),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_requests_are_refused_whole(name: str) -> None:
    message, error = BAD_REQUESTS[name]
    async with running_shard(ToyBackend(embedding_size=SIZE)) as shard:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await shard.stub.Embed(message)
        assert error_code(caught.value) is error
        assert len(await embed(shard, b"b" * 512)) == 1


async def test_a_shard_without_vectors_says_so() -> None:
    async with running_shard() as shard:
        assert (await shard.stub.Info(shard_pb2.InfoRequest())).limits.embedding_size == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await shard.stub.Embed(request(b"a"))
        assert error_code(caught.value) is ShardError.BAD_REQUEST
        assert "--embeddings" in (caught.value.details() or "")


async def test_a_shard_that_only_embeds_has_room_for_no_sequence() -> None:
    backend = ToyBackend(cells=0, max_sequences=0, max_batch_tokens=0, embedding_size=SIZE)
    async with running_shard(backend) as shard:
        limits = (await shard.stub.Info(shard_pb2.InfoRequest())).limits
        assert (limits.max_sequences, limits.layouts[0].cells, limits.embedding_size) == (0, 0, SIZE)
        await shard.take()
        constraint = shard_pb2.CompileConstraintRequest(constraint=types_pb2.Constraint(regex="a"))
        calls: list[Callable[[], Any]] = [
            lambda: shard.prefill(prompt_chunk(0, b"abc")),
            lambda: shard.stub.CompileConstraint(constraint),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert error_code(caught.value) is ShardError.BAD_REQUEST
            assert "only embeds" in (caught.value.details() or "")
        np.testing.assert_array_equal(await embed(shard, *TEXTS), [toy_embedding(text, SIZE) for text in TEXTS])


async def test_texts_come_between_the_steps_of_a_decode() -> None:
    prompt = list(b"to be continued")
    async with running_shard(ToyBackend(embedding_size=SIZE, step_s=0.005)) as shard:
        await shard.take()
        reply = await shard.prefill(prompt_chunk(0, prompt, ignore_eos=True))
        output = list(reply.tokens.token_ids)
        steps = aiter(shard.steps([0]))
        output += (await anext(steps)).tokens.token_ids
        np.testing.assert_array_equal(await embed(shard, *TEXTS), [toy_embedding(text, SIZE) for text in TEXTS])
        async for step in steps:
            output += step.tokens.token_ids
        assert output == expected_output(prompt, 50, ignore_eos=True)


async def test_texts_of_several_calls_take_turns_while_a_sequence_runs() -> None:
    first_entered, go_on = threading.Event(), threading.Event()
    computed: list[Sequence[int]] = []

    class Gated(ToyBackend):
        def embed(self, texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
            computed.extend(texts)
            first_entered.set()
            assert go_on.wait(DEADLINE_S)
            return super().embed(texts)

    backend = Gated(embedding_size=SIZE)
    async with running_shard(backend) as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"to be continued", ignore_eos=True))
        many = asyncio.ensure_future(embed(shard, *[[number] for number in range(10)]))
        assert await asyncio.to_thread(first_entered.wait, DEADLINE_S)
        one = asyncio.ensure_future(embed(shard, [200]))
        waiting = shard.server._shard.worker._asides
        await eventually(lambda: len(waiting) == 1, "the other call waits")
        go_on.set()
        await asyncio.gather(many, one)
    assert [text[0] for text in computed] == [0, 200, *range(1, 10)]


async def test_another_lease_leaves_texts_alone() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hook(_batch: object) -> None:
        entered.set()
        leave.wait(DEADLINE_S)

    async with running_shard(ToyBackend(embedding_size=SIZE, hook=hook)) as shard:
        await shard.take()
        call = shard.prefill(prompt_chunk(0, b"abc"))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        asking = asyncio.ensure_future(embed(shard, *TEXTS))
        queued = shard.decode([0])
        await queued.initial_metadata()
        await shard.take(2, router_id="another")
        leave.set()
        await call
        assert len(await asking) == len(TEXTS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await queued.read()
        assert error_code(caught.value) is ShardError.STALE_EPOCH
