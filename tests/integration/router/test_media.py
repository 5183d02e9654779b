"""Prompts with pictures and sounds over a whole Caravan: the output is that of the text that they spell."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from caravan_router.engine.media import MediaShelf
from caravan_scheduler.core.errors import GenerationError, TooMuchMediaError
from caravan_scheduler.core.media import Media, Picture, Sound
from caravan_shard.backends.toy.media import SLICE_CELLS, ToyEncoder
from caravan_testing.cluster import Cluster, ClusterConfig, cluster
from caravan_testing.specs import spec, undisturbed
from caravan_testing.toy_media import spelled_picture, spelled_sound
from caravan_testing.waiting import eventually

_TEXT = "what is this: "


def _picture(text: str) -> Picture:
    return Picture.of(*spelled_picture(text))


def _sound(text: str) -> Sound:
    return Sound.of(16_000, spelled_sound(text))


async def _generated(running: Cluster, parts: Sequence[str | Media], new_tokens: int = 12, **fields: Any) -> list[int]:
    tokens = await running.engine.queries.tokenize_parts(tuple(parts))
    wanted = spec(tokens.tokens.token_ids, new_tokens, **fields)
    stream = running.engine.submit(replace(wanted, media=tokens.media))
    try:
        return [token.token_id async for ready in stream for token in ready]
    finally:
        stream.close()


async def _expected(running: Cluster, text: str, new_tokens: int = 12, **fields: Any) -> list[int]:
    tokens = await running.engine.queries.tokenize(text)
    return undisturbed(spec(tokens.token_ids, new_tokens, **fields))


@pytest.mark.parametrize("atomic", [False, True])
async def test_media_in_a_prompt_are_read_as_what_they_spell(atomic: bool) -> None:
    async with cluster(ClusterConfig(make_encoder=lambda: ToyEncoder(atomic=atomic))) as running:
        word = "x" * (SLICE_CELLS + 7)
        parts = (_TEXT, _picture("a cat"), " and ", _sound("a dog"), _picture(word), "?")
        assert await _generated(running, parts) == await _expected(running, f"{_TEXT}a cat and a dog{word}?")


async def test_a_prompt_that_begins_with_a_picture_has_its_begin_token() -> None:
    async with cluster(ClusterConfig(make_encoder=ToyEncoder)) as running:
        tokens = await running.engine.queries.tokenize_parts((_picture("cat"), "!"))
        text = await running.engine.queries.tokenize("cat!")
        assert tokens.tokens.token_ids[0] == text.token_ids[0]
        assert len(tokens.tokens.token_ids) == len(text.token_ids)
        assert await _generated(running, (_picture("cat"), "!")) == await _expected(running, "cat!")


async def test_the_second_use_of_a_picture_is_not_encoded() -> None:
    async with cluster(ClusterConfig(shards=2, make_encoder=ToyEncoder)) as running:
        for text in ("one ", "two ", "three "):
            parts = (text, _picture("a long picture of a cat"), text)
            assert await _generated(running, parts) == await _expected(running, f"{text}a long picture of a cat{text}")
        encoders = [backend.media for backend in running.backends.values()]
        assert sum(encoder.count for encoder in encoders if encoder is not None) == 1


async def test_streams_go_on_while_a_picture_is_encoded() -> None:
    encoder = ToyEncoder(seconds=60.0)
    async with cluster(ClusterConfig(make_encoder=lambda: encoder)) as running:
        shown = asyncio.ensure_future(_generated(running, (_TEXT, _picture("cat"))))
        await eventually(lambda: any(one.media for one in _waiting(running)))
        text = await running.engine.queries.tokenize("hello")
        stream = running.engine.submit(spec(text.token_ids, 8))
        assert [token.token_id async for ready in stream for token in ready] == await _expected(running, "hello", 8)
        assert not shown.done()
        encoder.stop()
        assert await shown == await _expected(running, f"{_TEXT}cat")


def _waiting(running: Cluster) -> list[Any]:
    return [sequence.spec for sequence in running.engine.scheduler.waiting]


async def test_a_picture_that_the_shard_has_dropped_is_sent_again() -> None:
    async with cluster(ClusterConfig(make_encoder=ToyEncoder)) as running:
        (address,) = running.addresses
        running.embeddings(address).capacity = 20  # those of one picture
        for number, name in enumerate(("cat", "dog", "cat")):
            parts = (f"{number}", _picture(f"a {name}"))
            assert await _generated(running, parts) == await _expected(running, f"{number}a {name}")
        (backend,) = running.backends.values()
        assert backend.media is not None
        assert backend.media.count == 3


async def test_a_lost_shard_s_pictures_are_encoded_elsewhere() -> None:
    async with cluster(ClusterConfig(shards=2, make_encoder=ToyEncoder, step_s=0.02)) as running:
        parts = (_TEXT, _picture("a cat"), "?")
        shown = asyncio.ensure_future(_generated(running, parts, 40))
        await eventually(lambda: any(shard.stays.residents for shard in running.engine.scheduler.shards.values()))
        (busy,) = (name for name, shard in running.engine.scheduler.shards.items() if shard.stays.residents)
        await running.stop_shard(busy)
        assert await shown == await _expected(running, f"{_TEXT}a cat?", 40)


async def test_a_picture_that_cannot_be_kept_ends_its_request() -> None:
    async with cluster(ClusterConfig(make_encoder=ToyEncoder)) as running:
        (address,) = running.addresses
        running.embeddings(address).capacity = 8
        with pytest.raises(GenerationError, match="could not be encoded"):
            await _generated(running, (_TEXT, _picture("a cat")))
        assert await _generated(running, (_TEXT, "a cat")) == await _expected(running, f"{_TEXT}a cat")


async def test_numbers_of_cells_never_leave_the_router() -> None:
    async with cluster(ClusterConfig(make_encoder=ToyEncoder)) as running:
        tokens = await running.engine.queries.tokenize_parts((_TEXT, _picture("a cat")))
        with pytest.raises(ValueError, match=r"[Oo]ut of range|too large"):
            await running.engine.queries.detokenize(tokens.tokens.token_ids)


def test_equal_media_are_kept_once_and_all_are_limited() -> None:
    shelf = MediaShelf(most_bytes=2000)
    first = shelf.kept(("a", _picture("cat" * 8)))
    again = shelf.kept((_picture("cat" * 8),))
    assert again[0] is first[1]
    assert shelf.size_bytes == _picture("cat" * 8).size_bytes
    with pytest.raises(TooMuchMediaError):
        shelf.kept((_picture("dog" * 8),))
    del first, again
    shelf.kept((_picture("dog" * 8),))
