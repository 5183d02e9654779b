"""Prompts of embeddings over a whole Caravan: the output is that of the tokens, however a sequence is moved."""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from caravan_proto.messages.limits import KvLayout
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.media import Embeddings
from caravan_shard.backends.given_embeddings import EmbeddingsEncoder
from caravan_shard.backends.toy.backend import TOY_INPUT_SIZE
from caravan_shard.backends.toy.media import SLICE_CELLS, ToyEncoder
from caravan_testing.cluster import Cluster, ClusterConfig, cluster
from caravan_testing.specs import read, run, spec, undisturbed
from caravan_testing.waiting import eventually

# Computing takes longer than copying.
_TOKEN_S = 0.0002


def _encoder() -> EmbeddingsEncoder:
    return EmbeddingsEncoder(TOY_INPUT_SIZE, None)


def _atomic() -> EmbeddingsEncoder:
    return EmbeddingsEncoder(TOY_INPUT_SIZE, ToyEncoder(atomic=True))


async def _spec(running: Cluster, tokens: bytes, new_tokens: int = 12, *, priority: int = 0) -> GenerationSpec:
    rows = Embeddings.of_bytes(len(tokens), 1, struct.pack(f"<{len(tokens)}f", *tokens))
    found = await running.engine.queries.tokenize_parts((rows,), add_special=False)
    return replace(spec(found.tokens.token_ids, new_tokens, priority=priority), media=found.media)


@pytest.mark.parametrize("make_encoder", [_encoder, _atomic])
async def test_embeddings_are_read_as_the_tokens_they_stand_for(make_encoder: Callable[[], EmbeddingsEncoder]) -> None:
    tokens = b"x" * (2 * SLICE_CELLS + 7)  # several slices where each is computed whole
    async with cluster(ClusterConfig(make_encoder=make_encoder, token_s=_TOKEN_S)) as running:
        wanted = await _spec(running, tokens)
        assert await run(running.engine, wanted) == undisturbed(spec(tokens, 12))


async def test_equal_embeddings_are_cached() -> None:
    async with cluster(ClusterConfig(make_encoder=_encoder, token_s=_TOKEN_S)) as running:
        wanted = await _spec(running, b"x" * 120)
        first, again = await run(running.engine, wanted), running.engine.submit(wanted)
        assert await read(again) == first
        assert again.cached_tokens >= 110


async def test_sequences_of_embeddings_are_preempted() -> None:
    config = ClusterConfig(
        cells=256, max_sequences=2, layout=KvLayout.SPLIT, step_s=0.01, token_s=_TOKEN_S, make_encoder=_encoder
    )
    prompts = [bytes([number]) * 40 for number in range(97, 101)]
    async with cluster(config) as running:
        (shard,) = running.engine.scheduler.shards.values()
        first = [asyncio.ensure_future(_run(running, prompt, 60)) for prompt in prompts[:2]]
        await eventually(lambda: len(shard.stays.decoding) == 2, "they decode")
        urgent = [asyncio.ensure_future(_run(running, prompt, 20, priority=1)) for prompt in prompts[2:]]
        outputs = await asyncio.gather(*first, *urgent)
        lengths = (60, 60, 20, 20)
        expected = [undisturbed(spec(prompt, length)) for prompt, length in zip(prompts, lengths, strict=True)]
        assert outputs == expected
        assert await running.metric('caravan_request_preemptions_total{how="swap"}') > 0


async def _run(running: Cluster, tokens: bytes, new_tokens: int, *, priority: int = 0) -> list[int]:
    return await run(running.engine, await _spec(running, tokens, new_tokens, priority=priority))


async def test_embeddings_of_a_lost_shard_are_sent_to_another() -> None:
    async with cluster(ClusterConfig(shards=2, make_encoder=_encoder, step_s=0.02)) as running:
        shown = asyncio.ensure_future(_run(running, b"some embeddings", 40))
        shards = running.engine.scheduler.shards
        await eventually(lambda: any(shard.stays.residents for shard in shards.values()))
        await running.stop_shard(next(name for name, shard in shards.items() if shard.stays.residents))
        assert await shown == undisturbed(spec(b"some embeddings", 40))
