"""Vectors over gRPC, on the toy backend."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from caravan_proto.errors import ShardError
from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_shard.arrays import Floats
from caravan_shard.backends.toy.backend import ToyBackend, toy_embedding
from caravan_shard.backends.toy.model import BOS, EOS
from caravan_testing.shard_harness import RunningShard, error_code, prompt_chunk, running_shard
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import DEADLINE_S, eventually

# grpc.aio works only on the event loop on which it was first used.
pytestmark = pytest.mark.asyncio(loop_scope="session")

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
