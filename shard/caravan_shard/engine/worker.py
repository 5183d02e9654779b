"""The one thread that calls the backend. It executes commands in the order in which they came.

A running Decode yields at the next step boundary, after at least one step, when another command is queued. Texts to
embed, runs of other shards, adapters and news of the model's files have a queue of their own. They are taken one at a
time between two commands or two steps, so that no sequence waits for more than one of them, and take at most half of
the time while a Decode runs. While no sequence could wait, texts share forward passes. Where the backend has lanes,
texts that wait then are computed side by side: threads of their own call `Engine.embed` and nothing else, while the one
thread is a lane itself.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter_ns
from typing import Any, TypeVar, assert_never

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Decode, Evaluate, FilterBatch, Load, Prefill, Save, SetLayout
from caravan_proto.messages.results import StepOutcome
from caravan_shard.backends.base import Backend, JointEmbed
from caravan_shard.engine.drafts import NO_DRAFTS, DraftBudget
from caravan_shard.engine.engine import Engine
from caravan_shard.engine.replies import Replies, call_on
from caravan_shard.media import MediaStore
from caravan_shard.protocol.commands import (
    Adopt,
    Aside,
    DropAdapters,
    EmbedText,
    KnowContents,
    LoadAdapter,
    ReleaseAll,
    UnloadAdapter,
    Work,
)
from caravan_shard.protocol.results import Refusal, Result, StepResult
from caravan_shard.sequences.runs import RunStore

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

ENDING = Refusal(ShardError.DRAINING, "this shard is ending")


@dataclass(frozen=True, slots=True)
class WaitingText:
    """A text, and where its vector goes."""

    command: EmbedText
    replies: Replies


class TextLanes:
    """Lanes that take texts of a queue as long as any waits, or any lane computes: the next text may come meanwhile."""

    def __init__(
        self,
        changed: threading.Condition,
        take: Callable[[], Sequence[WaitingText] | None],
        embed: Callable[[Sequence[WaitingText], int], None],
    ) -> None:
        """``changed`` is notified when the queue changes, and held when ``take`` is called.

        ``take`` returns the next texts of a lane, none if none waits, and None if the lanes should end. ``embed``
        computes texts on a lane and answers them.
        """
        self._changed = changed
        self._take = take
        self._embed = embed
        self._computing = 0
        self._failed = False

    def run(self, lanes: int, first: Sequence[WaitingText]) -> None:
        """Embed ``first`` and others on ``lanes`` lanes, of which the caller is one. Raises what ``embed`` raises."""
        self._computing = 1
        with ThreadPoolExecutor(lanes - 1, thread_name_prefix="embed") as threads:
            others = [threads.submit(self._run, lane) for lane in range(1, lanes)]
            self._run(0, first)
        for other in others:
            other.result()

    def _run(self, lane: int, texts: Sequence[WaitingText] = ()) -> None:
        while texts or (texts := self._next()):
            done = False
            try:
                self._embed(texts, lane)
                done = True
            finally:
                texts = ()
                with self._changed:
                    self._failed = self._failed or not done
                    self._computing -= 1
                    self._changed.notify_all()

    def _next(self) -> Sequence[WaitingText]:
        """Wait for texts, which then count as computed; empty if there is nothing more to do."""
        with self._changed:
            while not self._failed and (texts := self._take()) is not None:
                if texts:
                    self._computing += 1
                    return texts
                if not self._computing:
                    break
                self._changed.wait()
        return ()


@dataclass(frozen=True, slots=True)
class _Job:
    command: Work
    replies: Replies


class Worker:
    """Loads the backend on its own thread, then executes commands until stopped."""

    def __init__(
        self,
        load: Callable[[], Backend],
        sampling_threads: int,
        make_runs: Callable[[Backend], RunStore],
        media: MediaStore | None = None,
    ) -> None:
        """``load`` and ``make_runs`` run on the worker's thread."""
        self._media = media
        self._load = load
        self._make_runs = make_runs
        self._sampling_threads = sampling_threads
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._asides: deque[_Job] = deque()
        # When the last of these began and ended. The next one waits until as much time again has passed.
        self._aside_began_ns = self._aside_ended_ns = 0
        self._stopping = False
        # When the work without progress since then began; None while idle or waiting for the router to read.
        self._working_since: float | None = None
        self._thread = threading.Thread(target=self._main, name="llama", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[Engine] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    async def start(self) -> Engine:
        """Load the backend; raises what loading raised. Only the worker's thread may call methods of the engine."""
        self._thread.start()
        return await asyncio.shield(self._started)

    async def stop(self, timeout_s: float) -> None:
        """End the thread at the next step boundary; wait for that at most ``timeout_s``. Refuses queued commands.

        Last, the thread waits for the users of the model and frees it, also if that takes longer.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        await asyncio.wait({self.ended}, timeout=timeout_s)

    def submit(self, command: Work) -> Replies:
        """Queue a command. Only the event loop may call it. Commands run in the order of calls, but for
        those that have a queue of their own."""
        replies = Replies(self._loop, self._notify)
        with self._changed:
            if self._stopping:
                replies.answer(ENDING)
                return replies
            queue = self._asides if isinstance(command, Aside) else self._queue
            queue.append(_Job(command, replies))
            if self._working_since is None:
                self._working_since = monotonic()
            self._changed.notify()
        return replies

    def release_all(self, refusal: Refusal) -> None:
        """Release every sequence at the next step boundary; queued commands get ``refusal``."""
        with self._changed:
            overtaken = list(self._queue)
            self._queue.clear()
        for job in overtaken:
            if not isinstance(job.command, ReleaseAll):
                job.replies.answer(refusal)
        self.submit(ReleaseAll())
        self.submit(DropAdapters())

    @property
    def is_busy(self) -> bool:
        """Whether a command is queued or running. A Decode that waits for the router to read counts as idle."""
        return self._working_since is not None

    def stalled_s(self) -> float:
        """Return for how long there has been work without progress, in seconds."""
        since = self._working_since
        return 0.0 if since is None else monotonic() - since

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify()

    def _main(self) -> None:
        try:
            engine = self._make_engine()
        except Exception as error:  # noqa: BLE001  raised by `start`
            # `ended` first: the caller of `start` may close the loop as soon as it fails.
            call_on(self._loop, _succeed, self.ended, None)
            call_on(self._loop, _fail, self._started, error)
            return
        call_on(self._loop, _succeed, self._started, engine)
        running: _Job | None = None
        try:
            while (job := self._take()) is not None:
                running = job
                self._execute(engine, job)
            engine.close()
        except Exception as error:  # noqa: BLE001  raised by `ended`
            # A bug: the contents of the cache are unknown now, so the process must end.
            _log.exception("the worker failed")
            if running is not None:
                running.replies.answer(ENDING)
            self._refuse_all()
            call_on(self._loop, _fail, self.ended, error)
        else:
            call_on(self._loop, _succeed, self.ended, None)

    def _make_engine(self) -> Engine:
        """Load the backend. If anything fails, nothing of it is left."""
        with ExitStack() as acquired:
            backend = self._load()
            acquired.callback(backend.close)
            runs = self._make_runs(backend)
            acquired.callback(runs.close)
            engine = Engine(backend, self._sampling_threads, runs, media=self._media)
            acquired.pop_all()  # now they are the engine's
        return engine

    def _refuse_all(self) -> None:
        with self._changed:
            self._stopping = True
            for job in (*self._queue, *self._asides):
                job.replies.answer(ENDING)
            self._queue.clear()
            self._asides.clear()

    def _take(self) -> _Job | None:
        """Wait for the next command; None once stopped."""
        with self._changed:
            while not self._has_news:
                self._working_since = None
                self._changed.wait()
            if not self._stopping:
                self._working_since = monotonic()
                return (self._asides if self._aside_is_due or not self._queue else self._queue).popleft()
        self._refuse_all()
        return None

    def _execute(self, engine: Engine, job: _Job) -> None:
        started_ns = perf_counter_ns()
        command = job.command
        if job.replies.cancelled:
            return
        match command:
            case Prefill():
                job.replies.put(engine.prefill(command, started_ns))
            case Decode():
                self._decode(engine, command, job.replies, started_ns)
            case Evaluate():
                job.replies.put(engine.evaluate(command, started_ns))
            case FilterBatch():
                job.replies.put(engine.filter_batch(command))
            case Save():
                job.replies.put(engine.save(command, started_ns))
            case Load():
                job.replies.put(engine.load(command, started_ns))
            case SetLayout():
                job.replies.put(engine.set_layout(command, started_ns))
            case EmbedText() | Adopt() | KnowContents() | LoadAdapter() | UnloadAdapter() | DropAdapters():
                self._aside_began_ns = started_ns
                self._do_aside(engine, command, job.replies)
                self._aside_ended_ns = perf_counter_ns()
                return
            case ReleaseAll():
                engine.release_all()
            case _:
                assert_never(command)
        job.replies.end()

    def _do_aside(self, engine: Engine, command: Aside, replies: Replies) -> None:
        match command:
            case EmbedText():
                self._embed_waiting(engine, WaitingText(command, replies))
                return
            case Adopt():
                replies.put(engine.adopt(command))
            case KnowContents():
                engine.know_contents(command)
            case LoadAdapter():
                replies.put(engine.adapters.load(command))
            case UnloadAdapter():
                replies.put(engine.adapters.unload(command.key))
            case DropAdapters():
                engine.adapters.drop()
        replies.end()

    def _embed_waiting(self, engine: Engine, first: WaitingText) -> None:
        """Embed a text, and those that wait behind it, as far as they may share its forward pass or have lanes."""
        joint = engine.backend.capacity.joint_embed
        fits = joint.lanes > 1 and len(first.command.tokens) <= joint.lane_tokens
        others_wait = bool(self._asides) and isinstance(self._asides[0].command, EmbedText)
        if fits and others_wait and not engine.unfinished_count:
            self._embed_in_lanes(engine, first)
        else:
            with self._changed:
                alone = self._queue or engine.unfinished_count
                others = [] if alone else self._take_texts(joint, len(first.command.tokens), joint.texts - 1)
            self._embed(engine, [first, *others])

    def _embed(self, engine: Engine, texts: Sequence[WaitingText], lane: int | None = None) -> None:
        results: Sequence[Result] = [ENDING] * len(texts)  # if the backend fails
        try:
            results = engine.embed([text.command for text in texts], lane)
        finally:
            for text, result in zip(texts, results, strict=True):
                text.replies.answer(result)

    def _embed_in_lanes(self, engine: Engine, first: WaitingText) -> None:
        """Embed texts until none waits and no lane computes, or another command comes, or a text for all threads."""
        joint = engine.backend.capacity.joint_embed

        def take() -> list[WaitingText] | None:
            following = self._asides[0].command if self._asides else None
            is_long = isinstance(following, EmbedText) and len(following.tokens) > joint.lane_tokens
            if self._stopping or self._queue or is_long:
                return None
            share = -(-len(self._asides) // joint.lanes)
            taken = self._take_texts(joint, 0, min(joint.texts, share))
            if taken:
                self._working_since = monotonic()
            return taken

        TextLanes(self._changed, take, partial(self._embed, engine)).run(joint.lanes, [first])

    def _take_texts(self, joint: JointEmbed, tokens: int, most: int) -> list[WaitingText]:
        """Take at most ``most`` texts that are next in the queue and fit into a forward pass that has ``tokens``.

        A pass may have a longer text than ``joint`` allows for several.
        """
        taken: list[WaitingText] = []
        while self._asides and len(taken) < most:
            job = self._asides[0]
            if not isinstance(job.command, EmbedText) or (tokens and tokens + len(job.command.tokens) > joint.tokens):
                break
            self._asides.popleft()
            if not job.replies.cancelled:
                taken.append(WaitingText(job.command, job.replies))
                tokens += len(job.command.tokens)
        return taken

    def _decode(self, engine: Engine, command: Decode, replies: Replies, started_ns: int) -> None:
        refusal = engine.begin_decode(command)
        if refusal is not None:
            replies.put(refusal)
            return
        interval_ns = command.reply_interval_ms * 1_000_000
        budget = NO_DRAFTS
        tokens = 0  # of the sequence that got the most
        while tokens < command.max_steps:
            # Asked twice, since the first takes no lock.
            if tokens > 0 and (self._has_news or not replies.is_wanted) and not self._may_continue(engine, replies):
                return
            if command.max_draft_tokens:
                budget = DraftBudget(total=command.max_draft_tokens, each=command.max_steps - tokens - 1)
            # The time of such a command between two steps belongs to neither step.
            result = engine.decode_step(command.sequence_ids, max(started_ns, self._aside_ended_ns), budget)
            if result is None:
                return
            if not isinstance(result, StepResult) or result.outcome is not StepOutcome.OK:
                replies.put(result)
                return
            tokens += result.most_tokens
            started_ns = perf_counter_ns()
            replies.put(result, interval_ns=0 if result.rows.ends_a_sequence else interval_ns)
            self._working_since = monotonic()

    def _may_continue(self, engine: Engine, replies: Replies) -> bool:
        """Whether a Decode continues. First does what is due beside it, and waits while too many replies are unread."""
        while True:
            with self._changed:
                while not (replies.has_room or self._has_news or replies.cancelled):
                    self._working_since = None
                    self._changed.wait()
                if self._working_since is None:
                    self._working_since = monotonic()
                if self._queue or replies.cancelled or self._stopping:
                    return False
                aside = (
                    self._asides.popleft() if self._aside_is_due or (self._asides and not replies.has_room) else None
                )
            if aside is not None:
                replies.flush()
                self._execute(engine, aside)
                self._working_since = monotonic()
            if replies.has_room:
                return True

    @property
    def _aside_is_due(self) -> bool:
        rest_ns = self._aside_ended_ns - self._aside_began_ns
        return bool(self._asides) and perf_counter_ns() >= self._aside_ended_ns + rest_ns

    @property
    def _has_news(self) -> bool:
        return bool(self._queue or self._asides or self._stopping)


def _succeed(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
