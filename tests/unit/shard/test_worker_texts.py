"""Texts that a worker embeds while no sequence could wait: together, or side by side in lanes."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Prefill
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import JointEmbed
from caravan_shard.backends.toy.backend import ToyBackend, toy_embedding
from caravan_shard.engine.replies import Replies
from caravan_shard.engine.worker import ENDING
from caravan_shard.protocol.commands import EmbedText
from caravan_shard.protocol.results import Embedded, Refusal
from caravan_testing.shard_builders import all_of, first_chunk, toy_prompt, until, worker_on
from caravan_testing.waiting import DEADLINE_S

LANES = 3


class GatedTexts(ToyBackend):
    """Notes the texts of each forward pass. The first one waits until it is let go."""

    def __init__(self) -> None:
        super().__init__(embedding_size=8)
        self.passes: list[list[Sequence[int]]] = []
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.fails = False

    def embed(self, texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
        self.passes.append(list(texts))
        self.entered.set()
        assert self.go_on.wait(DEADLINE_S)
        if self.fails:
            raise RuntimeError("a bug")
        return super().embed(texts)

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, DEADLINE_S)

    @property
    def sizes(self) -> list[list[int]]:
        """The lengths of the texts of each pass."""
        return [[len(text) for text in texts] for texts in self.passes]


async def embeddings_of(replies: Sequence[Replies]) -> list[Floats]:
    results = [await all_of(one) for one in replies]
    return [result.values for (result,) in results if isinstance(result, Embedded)]


async def test_texts_that_wait_share_a_forward_pass() -> None:
    backend = GatedTexts()
    joint = backend.capacity.joint_embed
    assert (joint.texts, joint.tokens) == (8, 512)
    texts = [[65, key] for key in range(10)] + [[66] * 500, [67] * 13, [68] * 512, [69]]
    async with worker_on(backend) as (worker, _engine):
        first = worker.submit(EmbedText([64]))
        await backend.until_entered()
        waiting = [worker.submit(EmbedText(text)) for text in texts]
        waiting[1].cancel()
        backend.go_on.set()
        (alone,) = await embeddings_of([first])
        made = await embeddings_of([waiting[0], *waiting[2:]])
        np.testing.assert_array_equal(alone, toy_embedding([64], 8))
        np.testing.assert_array_equal(made, [toy_embedding(text, 8) for text in (texts[0], *texts[2:])])
    assert backend.sizes == [[1], [2] * 8, [2, 500], [13], [512], [1]]


async def test_texts_share_no_forward_pass_while_a_sequence_could_wait() -> None:
    backend = GatedTexts()
    async with worker_on(backend) as (worker, _engine):
        await all_of(worker.submit(Prefill(chunks=[first_chunk(1, toy_prompt("sequence"), max_new=9)])))
        first = worker.submit(EmbedText([64]))
        await backend.until_entered()
        texts = [worker.submit(EmbedText([65, key])) for key in range(3)]
        backend.go_on.set()
        assert len(await embeddings_of([first, *texts])) == 4
        assert backend.sizes == [[1], [2], [2], [2]]


async def test_all_texts_of_a_pass_hear_of_a_bug() -> None:
    backend = GatedTexts()
    async with worker_on(backend) as (worker, _engine):
        first = worker.submit(EmbedText([64]))
        await backend.until_entered()
        texts = [worker.submit(EmbedText([65, key])) for key in range(3)]
        backend.go_on.set()
        assert len(await embeddings_of([first])) == 1
        await embeddings_of(texts)
        backend.entered.clear()
        backend.go_on.clear()
        first = worker.submit(EmbedText([64]))
        await backend.until_entered()
        texts = [worker.submit(EmbedText([65, key])) for key in range(3)]
        backend.fails = True
        backend.go_on.set()
        for replies in (first, *texts):
            assert await all_of(replies) == [ENDING]
        with pytest.raises(RuntimeError, match="a bug"):
            await worker.ended


class Lanes(ToyBackend):
    """Every pass waits until it is let go. Notes which lane has which texts, and the most passes at the same time."""

    def __init__(self) -> None:
        super().__init__(embedding_size=8)
        self.capacity = replace(self.capacity, joint_embed=JointEmbed(texts=8, tokens=16, lanes=LANES, lane_tokens=48))
        self.passes: list[tuple[int | None, list[int]]] = []
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.fails_with: int | None = None
        self._changes = threading.Lock()
        self._computing = self.most_computing = 0

    def embed(self, texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
        with self._changes:
            self.passes.append((lane, [len(text) for text in texts]))
            self._computing += 1
            self.most_computing = max(self.most_computing, self._computing)
        self.entered.release()
        assert self.go_on.acquire(timeout=DEADLINE_S)
        with self._changes:
            self._computing -= 1
        if any(len(text) == self.fails_with for text in texts):
            raise RuntimeError("a bug")
        return super().embed(texts, lane)

    async def until_entered(self, passes: int = 1) -> None:
        for _ in range(passes):
            assert await asyncio.to_thread(self.entered.acquire, timeout=DEADLINE_S)


async def test_a_text_alone_has_all_threads() -> None:
    backend = Lanes()
    backend.go_on.release(2)
    async with worker_on(backend) as (worker, _engine):
        for text in ([65], [66] * 40):
            await embeddings_of([worker.submit(EmbedText(text))])
    assert backend.passes == [(None, [1]), (None, [40])]


async def test_texts_that_wait_are_computed_side_by_side_each_once() -> None:
    backend = Lanes()
    lengths = [5, 6, 7, 40, 3, 3, 3, 2, 2, 1]
    async with worker_on(backend) as (worker, _engine):
        first = worker.submit(EmbedText([64]))
        await backend.until_entered()
        texts = [[65 + place] * length for place, length in enumerate(lengths)]
        waiting = [worker.submit(EmbedText(text)) for text in texts]
        waiting[1].cancel()
        backend.go_on.release()
        await embeddings_of([first])
        await backend.until_entered(LANES)
        backend.go_on.release(100)
        made = await embeddings_of([waiting[0], *waiting[2:]])
    np.testing.assert_array_equal(made, [toy_embedding(text, 8) for text in (texts[0], *texts[2:])])
    assert backend.most_computing == LANES
    alone, *in_lanes = backend.passes
    assert (alone, {lane for lane, _ in in_lanes}) == ((None, [1]), set(range(LANES)))
    assert sorted(length for _, together in in_lanes for length in together) == sorted([5, *lengths[2:]])
    assert all(len(together) == 1 or sum(together) <= 16 for _, together in in_lanes)


async def test_a_text_that_comes_later_has_a_lane_that_is_idle() -> None:
    backend = Lanes()
    async with worker_on(backend) as (worker, _engine):
        replies = [worker.submit(EmbedText([64]))]
        await backend.until_entered()
        replies += [worker.submit(EmbedText([65])), worker.submit(EmbedText([66]))]
        backend.go_on.release()
        await backend.until_entered(2)
        replies.append(worker.submit(EmbedText([67])))
        await backend.until_entered()
        assert backend.most_computing == LANES
        backend.go_on.release(3)
        assert len(await embeddings_of(replies)) == 4
        await until(lambda: not worker.is_busy)
        # All lanes have ended, and the next text is alone again.
        replies = [worker.submit(EmbedText([68, 69]))]
        backend.go_on.release()
        await embeddings_of(replies)
    assert backend.passes[-1] == (None, [2])


async def test_a_text_too_long_for_a_lane_has_all_threads() -> None:
    backend = Lanes()
    backend.go_on.release(100)
    async with worker_on(backend) as (worker, _engine):
        replies = [worker.submit(EmbedText([65] * length)) for length in (16, 16, 49, 16, 16, 48, 49, 50)]
        assert len(await embeddings_of(replies)) == 8
    lanes = {length: {lane for lane, together in backend.passes if length in together} for length in (48, 49, 50)}
    assert lanes[49] == lanes[50] == {None}
    assert all(together == [length] for lane, together in backend.passes if lane is None for length in together)


async def test_another_command_ends_the_lanes_before_further_texts() -> None:
    backend = Lanes()
    async with worker_on(backend) as (worker, _engine):
        replies = [worker.submit(EmbedText([64]))]
        await backend.until_entered()
        replies += [worker.submit(EmbedText([65] * 16)) for _ in range(LANES + 1)]
        backend.go_on.release()
        await backend.until_entered(LANES)
        worker.release_all(Refusal(ShardError.STALE_EPOCH, "overtaken"))
        backend.go_on.release(LANES)
        # The command is done; the text that is left finds nobody beside it.
        await backend.until_entered()
        assert backend.passes[-1] == (None, [16])
        backend.go_on.release()
        assert len(await embeddings_of(replies)) == LANES + 2


async def test_all_texts_of_all_lanes_hear_of_a_bug() -> None:
    backend = Lanes()
    backend.fails_with = 7
    async with worker_on(backend) as (worker, _engine):
        first = worker.submit(EmbedText([64]))
        await backend.until_entered()
        texts = [worker.submit(EmbedText([65] * length)) for length in (1, 7, 16, 16, 16)]
        backend.go_on.release()
        await embeddings_of([first])
        await backend.until_entered(LANES)
        backend.go_on.release(100)
        answers = [await all_of(replies) for replies in texts]
        assert answers[1] == [ENDING]
        assert all(answer == [ENDING] or isinstance(answer[0], Embedded) for answer in answers)
        with pytest.raises(RuntimeError, match="a bug"):
            await worker.ended


async def test_texts_that_wait_while_the_worker_stops_are_refused() -> None:
    backend = Lanes()
    async with worker_on(backend) as (worker, _engine):
        first = worker.submit(EmbedText([64]))
        await backend.until_entered()
        texts = [worker.submit(EmbedText([65] * 16)) for _ in range(LANES + 2)]
        backend.go_on.release()
        await backend.until_entered(LANES)
        stopping = asyncio.create_task(worker.stop(60.0))
        await asyncio.sleep(0)
        backend.go_on.release(LANES)
        await stopping
        assert len(await embeddings_of([first, *texts[:LANES]])) == 1 + LANES
        assert [await all_of(replies) for replies in texts[LANES:]] == [[ENDING]] * 2
        assert worker.ended.done()
