"""The worker: the order of commands, a Decode that yields, and a router that stops reading."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Decode, FilterBatch, Load, Prefill, Save, SetLayout
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import Holdings, LayoutSet, Loaded, Saved, StepOutcome
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Backend, DecodeOutcome, TokenBatch
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.engine.replies import MOST_TOGETHER, RUN_AHEAD, Replies
from caravan_shard.engine.worker import ENDING, Worker
from caravan_shard.protocol.commands import EmbedText
from caravan_shard.protocol.results import Embedded, Refusal, Result, StepResult
from caravan_shard.sequences.runs import RunStore
from caravan_shard.service.loaded_shard import LoadedShard
from caravan_shard.startup_error import StartupError
from caravan_testing.shard_builders import (
    all_of,
    first_chunk,
    load_entry,
    make_runs,
    save_entry,
    toy_prompt,
    until,
    worker_on,
)
from caravan_testing.waiting import DEADLINE_S, in_time

OVERTAKEN = Refusal(ShardError.STALE_EPOCH, "overtaken")
START = Prefill(
    chunks=[first_chunk(key, toy_prompt(f"sequence {key}"), max_new=5_000, ignore_eos=True) for key in range(2)]
)
DECODE = Decode(sequence_ids=[0, 1], max_steps=4_000)


class Gate:
    """Blocks steps until it is opened."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.is_open = threading.Event()

    def __call__(self, _batch: TokenBatch) -> DecodeOutcome | None:
        self.entered.release()
        if not self.is_open.is_set():
            self._allowed.acquire()
        return None

    def allow_one(self) -> None:
        self._allowed.release()

    def open(self) -> None:
        self.is_open.set()
        self._allowed.release()

    async def next_step(self) -> None:
        """Wait until the next step has started."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=DEADLINE_S)


async def test_commands_run_in_the_order_they_were_submitted() -> None:
    async with worker_on(ToyBackend()) as (worker, _engine):
        started = worker.submit(START)
        filtered = worker.submit(FilterBatch(keep=[1]))
        refused = worker.submit(Decode(sequence_ids=[0], max_steps=1))
        assert isinstance((await all_of(started))[0], StepResult)
        (holdings,) = await all_of(filtered)
        assert isinstance(holdings, Holdings)
        assert holdings.sequence_ids == [1]
        (refusal,) = await all_of(refused)
        assert isinstance(refusal, Refusal)
        assert refusal.error is ShardError.UNKNOWN_SEQUENCE


async def test_a_decode_yields_to_the_next_command_after_the_running_step() -> None:
    gate = Gate()
    backend = ToyBackend()
    async with worker_on(backend) as (worker, engine):
        await all_of(worker.submit(START))
        backend.hook = gate
        decode = worker.submit(DECODE)
        await gate.next_step()
        gate.allow_one()
        await gate.next_step()
        filtered = worker.submit(FilterBatch(keep=[0, 1]))
        gate.open()
        assert len(await all_of(decode)) == 2
        assert len(await all_of(filtered)) == 1
        assert engine.step_count == 3


async def test_a_decode_yields_to_commands_about_runs_and_runs_outlive_a_lease() -> None:
    gate = Gate()
    backend = ToyBackend(cells=65_536, other_layouts=[KvLayout.SPLIT])
    async with worker_on(backend) as (worker, engine):
        await all_of(worker.submit(START))
        backend.hook = gate
        decode = worker.submit(DECODE)
        await gate.next_step()
        prompt = engine._pool.held[0].tokens[: engine._pool.held[0].computed]
        saved = worker.submit(Save(entries=[save_entry(0, prompt)]))
        gate.open()
        assert len(await all_of(decode)) == 1
        (result,) = await all_of(saved)
        assert isinstance(result, Saved)
        assert result.sizes_bytes == [8 * len(prompt)]
        (result,) = await all_of(worker.submit(SetLayout(layout=KvLayout.SPLIT)))
        assert isinstance(result, LayoutSet)
        assert list(result.lost) == []
        worker.release_all(OVERTAKEN)
        (result,) = await all_of(worker.submit(Load(entries=[load_entry(0, prompt)])))
        assert isinstance(result, Loaded)
        assert result.loaded == [True]
        assert engine.unfinished_count == 0


async def test_a_decode_runs_one_step_even_if_other_commands_wait() -> None:
    gate = Gate()
    async with worker_on(ToyBackend(hook=gate)) as (worker, _engine):
        started = worker.submit(START)
        await gate.next_step()
        first, second = worker.submit(DECODE), worker.submit(DECODE)
        last = worker.submit(FilterBatch(keep=[]))
        gate.open()
        assert [len(await all_of(replies)) for replies in (started, first, second, last)] == [1, 1, 1, 1]


async def test_a_router_that_stops_reading_stops_the_decode_without_a_stall() -> None:
    async with worker_on(ToyBackend()) as (worker, engine):
        await all_of(worker.submit(START))
        decode = worker.submit(DECODE)
        await until(lambda: engine.step_count == 1 + RUN_AHEAD and not worker.is_busy)
        assert worker.stalled_s() == 0.0
        for _ in range(3):
            await decode.next()
        await until(lambda: engine.step_count == 1 + RUN_AHEAD + 3 and not worker.is_busy)
        # A Decode whose results are not read still yields to other commands.
        assert len(await all_of(worker.submit(FilterBatch(keep=[])))) == 1
        assert len(await all_of(decode)) == RUN_AHEAD


async def test_a_cancelled_decode_stops_at_the_next_boundary() -> None:
    gate = Gate()
    backend = ToyBackend()
    async with worker_on(backend) as (worker, engine):
        await all_of(worker.submit(START))
        backend.hook = gate
        decode = worker.submit(DECODE)
        await gate.next_step()
        decode.cancel()
        gate.open()
        await until(lambda: not worker.is_busy)
        assert engine.step_count == 2


async def test_a_command_that_is_cancelled_before_it_starts_does_nothing() -> None:
    gate = Gate()
    async with worker_on(ToyBackend(hook=gate)) as (worker, engine):
        started = worker.submit(START)
        await gate.next_step()
        worker.submit(FilterBatch(keep=[])).cancel()
        gate.open()
        await all_of(started)
        assert len(await all_of(worker.submit(FilterBatch(keep=[0, 1])))) == 1
        assert engine.sequence_count == 2


async def test_releasing_all_ends_the_running_decode_and_refuses_queued_commands() -> None:
    gate = Gate()
    backend = ToyBackend()
    async with worker_on(backend) as (worker, engine):
        await all_of(worker.submit(START))
        backend.hook = gate
        decode = worker.submit(DECODE)
        await gate.next_step()
        waiting = worker.submit(DECODE)
        worker.release_all(OVERTAKEN)
        gate.open()
        assert len(await all_of(decode)) == 1
        assert await all_of(waiting) == [OVERTAKEN]
        await until(lambda: engine.sequence_count == 0)
        assert backend.cache.used == 0


async def test_a_step_that_does_not_end_is_a_stall() -> None:
    gate = Gate()
    async with worker_on(ToyBackend(hook=gate)) as (worker, _engine):
        assert worker.stalled_s() == 0.0
        started = worker.submit(START)
        await gate.next_step()
        await until(lambda: worker.stalled_s() > 0.02)
        assert worker.is_busy
        gate.open()
        await all_of(started)
        await until(lambda: worker.stalled_s() == 0.0)


async def test_stopping_refuses_queued_commands() -> None:
    gate = Gate()
    async with worker_on(ToyBackend(hook=gate)) as (worker, _engine):
        started = worker.submit(START)
        await gate.next_step()
        waiting = worker.submit(DECODE)
        stopping = asyncio.create_task(worker.stop(5.0))
        await asyncio.sleep(0)
        gate.open()
        await stopping
        assert len(await all_of(started)) == 1
        assert await all_of(waiting) == [ENDING]
        assert await all_of(worker.submit(DECODE)) == [ENDING]


async def test_start_raises_the_error_of_loading() -> None:
    def load() -> ToyBackend:
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        await Worker(load, 1, make_runs).start()


class ClosableBackend(ToyBackend):
    """Notes that it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


async def test_a_model_whose_store_cannot_be_opened_is_freed() -> None:
    backend = ClosableBackend()

    def fail(_backend: Backend) -> RunStore:
        raise StartupError("cannot use --cache-dir")

    with pytest.raises(StartupError, match="--cache-dir"):
        await Worker(lambda: backend, 1, fail).start()
    assert backend.is_closed


async def test_a_shard_whose_start_is_cancelled_frees_its_model() -> None:
    backend = ClosableBackend()
    loading, may_end = threading.Event(), threading.Event()

    def load() -> Backend:
        loading.set()
        assert may_end.wait(DEADLINE_S)
        return backend

    shard = LoadedShard(ShardConfig(backend="fake"), load)
    starting = asyncio.create_task(shard.start())
    assert await asyncio.to_thread(loading.wait, DEADLINE_S)
    starting.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await shard.worker.ended
    assert backend.is_closed


async def test_an_exception_ends_the_worker_and_answers_every_command() -> None:
    def hook(_batch: TokenBatch) -> None:
        raise RuntimeError("broken")

    worker = Worker(lambda: ToyBackend(hook=hook), 1, make_runs)
    await worker.start()
    running, waiting = worker.submit(START), worker.submit(DECODE)
    with pytest.raises(RuntimeError, match="broken"):
        await worker.ended
    assert await all_of(running) == [ENDING]
    assert await all_of(waiting) == [ENDING]
    assert await all_of(worker.submit(DECODE)) == [ENDING]


class TimedBackend(ToyBackend):
    """Records "s" for every step and "t" for every embedded text. On its clock a step takes 2 ms, and a text 20 ms."""

    def __init__(self) -> None:
        super().__init__(embedding_size=8, hook=self._note)
        self.trace = ""
        self.now_ns = 0
        self.has_texts = threading.Event()

    def _note(self, _batch: TokenBatch) -> None:
        self.trace += "s"
        if self.trace == "ss":
            assert self.has_texts.wait(DEADLINE_S)
        self.now_ns += 2_000_000

    def embed(self, texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
        self.trace += "t"
        self.now_ns += 20_000_000
        return super().embed(texts)


async def test_texts_are_embedded_between_steps_and_take_at_most_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TimedBackend()
    for module in ("worker", "engine"):
        monkeypatch.setattr(f"caravan_shard.engine.{module}.perf_counter_ns", lambda: backend.now_ns)
    # A worker that waits for its replies to be read embeds more.
    monkeypatch.setattr("caravan_shard.engine.replies.RUN_AHEAD", 100)
    async with worker_on(backend) as (worker, _engine):
        await all_of(worker.submit(START))
        decoding = worker.submit(Decode(sequence_ids=[0, 1], max_steps=60))
        await until(lambda: backend.trace == "ss")
        texts = [worker.submit(EmbedText([65, key] * 10)) for key in range(4)]
        backend.has_texts.set()
        steps = await all_of(decoding)
        assert len(steps) == 60
        # The time of a text is not part of the time of any step.
        assert {step.timings.total_ns for step in steps if isinstance(step, StepResult)} == {2_000_000}
        for replies in texts:
            assert [type(result) for result in await all_of(replies)] == [Embedded]
        assert backend.trace.count("t") == 4
        assert [len(run) for run in backend.trace.split("t")] == [2, 10, 10, 10, 29]


async def test_texts_are_embedded_between_commands() -> None:
    gate = Gate()
    async with worker_on(ToyBackend(embedding_size=8, hook=gate)) as (worker, engine):
        worker.submit(START)
        await gate.next_step()
        kept = [worker.submit(FilterBatch(keep=[0, 1])) for _ in range(3)]
        texts = [worker.submit(EmbedText([65, key])) for key in range(3)]
        gate.open()
        for replies in (*texts, *kept):
            assert len(await all_of(replies)) == 1
        assert engine.sequence_count == 2


async def test_texts_are_embedded_while_the_results_of_a_decode_are_not_read() -> None:
    async with worker_on(ToyBackend(embedding_size=8)) as (worker, engine):
        await all_of(worker.submit(START))
        decoding = worker.submit(DECODE)
        await until(lambda: not worker.is_busy)
        steps = engine.step_count
        for key in range(3):
            assert [type(result) for result in await all_of(worker.submit(EmbedText([65, key])))] == [Embedded]
        assert engine.step_count == steps == 1 + RUN_AHEAD
        await until(lambda: not worker.is_busy)
        assert [type(result) for result in await decoding.next() or ()] == [StepResult]
        await until(lambda: engine.step_count == steps + 1)
        decoding.cancel()


async def test_texts_survive_a_new_lease_but_not_the_end_of_the_worker() -> None:
    gate = Gate()
    async with worker_on(ToyBackend(embedding_size=8, hook=gate)) as (worker, engine):
        worker.submit(START)
        await gate.next_step()
        text = worker.submit(EmbedText([65]))
        overtaken = worker.submit(DECODE)
        worker.release_all(OVERTAKEN)
        assert await all_of(overtaken) == [OVERTAKEN]
        gate.open()
        assert [type(result) for result in await all_of(text)] == [Embedded]
        await until(lambda: engine.sequence_count == 0)
        await worker.stop(5.0)
        assert await all_of(worker.submit(EmbedText([65]))) == [ENDING]


async def groups_of(replies: Replies) -> list[Sequence[Result]]:
    groups = []
    async with in_time("all results"):
        while (together := await replies.next()) is not None:
            groups.append(together)
    return groups


async def test_steps_that_follow_each_other_closely_are_sent_together() -> None:
    async with worker_on(ToyBackend()) as (worker, engine):
        await all_of(worker.submit(START))
        decoding = worker.submit(Decode(sequence_ids=[0, 1], max_steps=70, reply_interval_ms=10**6))
        groups = await groups_of(decoding)
        # The first is sent at once, then as many as may be held, then what is left at the end.
        assert [len(group) for group in groups] == [1, MOST_TOGETHER, MOST_TOGETHER, 70 - 1 - 2 * MOST_TOGETHER]
        steps = [step for group in groups for step in group if isinstance(step, StepResult)]
        assert [len(step.rows.token_ids) for step in steps] == [2] * 70
        assert engine.step_count == 71


async def test_the_end_of_a_sequence_and_a_step_that_fails_are_not_held() -> None:
    chunks = [first_chunk(key, toy_prompt("four"), max_new=4 + 40 * key, ignore_eos=True) for key in range(2)]
    async with worker_on(ToyBackend(cells=50)) as (worker, _engine):
        await all_of(worker.submit(Prefill(chunks=chunks)))
        decoding = worker.submit(Decode(sequence_ids=[0, 1], max_steps=100, reply_interval_ms=10**6))
        groups = await groups_of(decoding)
        assert [len(group) for group in groups[:2]] == [1, 2]
        last = groups[-1][-1]
        assert isinstance(last, StepResult)
        assert last.outcome is StepOutcome.NO_KV


async def test_tokens_do_not_wait_for_a_text() -> None:
    entered, allowed = threading.Event(), threading.Event()

    class SlowTexts(ToyBackend):
        def embed(self, texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
            entered.set()
            allowed.wait(DEADLINE_S)
            return super().embed(texts)

    gate = Gate()
    async with worker_on(SlowTexts(embedding_size=8, hook=gate)) as (worker, _engine):
        gate.allow_one()
        await all_of(worker.submit(START))
        decoding = worker.submit(Decode(sequence_ids=[0, 1], max_steps=4, reply_interval_ms=10**6))
        gate.allow_one()
        assert len(await decoding.next() or ()) == 1
        for _ in range(3):  # the prompts, the first step of the Decode, the second one
            await gate.next_step()
        text = worker.submit(EmbedText([65]))
        gate.allow_one()
        async with in_time("the text is embedded beside the steps"):
            assert await asyncio.to_thread(entered.wait, DEADLINE_S)
            assert len(await decoding.next() or ()) == 1
        allowed.set()
        gate.open()
        assert [type(result) for result in await all_of(text)] == [Embedded]
        assert len(await all_of(decoding)) == 2


def test_a_step_that_outlives_the_loop_ends_and_frees_the_model() -> None:
    """A program waits for the end of a model for a limited time, then closes its loop."""
    entered, may_end = threading.Event(), threading.Event()
    backend = ClosableBackend()

    def hook(_batch: TokenBatch) -> None:
        entered.set()
        assert may_end.wait(DEADLINE_S)

    backend.hook = hook

    async def leave_in_a_step() -> Worker:
        worker = Worker(lambda: backend, 1, make_runs)
        await worker.start()
        worker.submit(START)
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        await worker.stop(0.0)
        return worker

    worker = asyncio.run(leave_in_a_step())
    assert not backend.is_closed
    may_end.set()
    worker._thread.join(DEADLINE_S)
    assert backend.is_closed
