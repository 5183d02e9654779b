"""Responses in the background: each is a task of the server, which goes on without its client and after a restart."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from caravan_dialects.api.errors import (
    BackgroundLimitError,
    EndingError,
    InvalidKeyError,
    RepeatedRequestError,
    RequestError,
    UnknownModelError,
)
from caravan_dialects.api.generation.in_progress import RequestInProgress
from caravan_dialects.api.generation.serving import PRIORITY_HEADER, Sender
from caravan_dialects.api.openai.responses.background import (
    AskedBackground,
    BackgroundAnswer,
    JobRecord,
    Saved,
    failed_end,
    with_window,
)
from caravan_dialects.api.openai.responses.event_log import EventLog, LostJobError
from caravan_dialects.api.openai.responses.reply import AskedResponse, new_response
from caravan_dialects.api.openai.responses.schema import ResponseObject, ResponseRequest
from caravan_dialects.api.openai.responses.turn import BegunBefore, begun_turn
from caravan_dialects.api.stream import NAMED_EVENTS
from caravan_dialects.auth.client import Client
from caravan_dialects.conversations.nodes import Job, JobEnd, Transaction
from caravan_dialects.conversations.store import StoreError
from caravan_router.http.generation.answer import IN_PROGRESS, REMEMBERED, admitted
from caravan_router.http.generation.models import sender_context
from caravan_router.http.server.authentication import client_named
from caravan_router.http.server.event_stream import EventStream
from caravan_router.http.server.ignored import IGNORED
from caravan_router.http.server.sole_worker import SoleWorker, Work, end_tasks
from caravan_router.http.server.state import CLIENT, ENDING, RUNNING, STATE, owner_of
from caravan_scheduler.core.engine import TEXT_SENDER, TextSender
from caravan_scheduler.core.errors import EngineError, ModelReplacedError, NoShardError
from caravan_scheduler.core.trace import NO_TRACE

_log = logging.getLogger(__name__)

ROUTE = "/v1/responses"
# Between two attempts while no shard is up.
_RETRY_S = 1.0
# For this long, others that share the database may continue a response whose model is not served here.
_PASSED_ON_S = 5.0


def note_skipped(app: web.Application, asked: AskedResponse) -> None:
    """Log the types of tools and items of which the model is shown nothing."""
    for kind in asked.skipped_tools:
        app[IGNORED].note(f"tools of {ROUTE}", kind)
    for kind in asked.skipped_items:
        app[IGNORED].note(f"items of {ROUTE}", kind)


async def followed(request: web.Request, log: EventLog, first: int) -> web.StreamResponse:
    """Stream the events of a response from the number ``first`` on. They end early if the store cannot be read."""
    async with EventStream(request, {}, request.app[STATE].limits, NAMED_EVENTS) as events:
        with suppress(StoreError):
            async for messages in log.read(first, request.app[ENDING]):
                await events.send(*messages)
    return events.response


@dataclass(slots=True, kw_only=True, eq=False)
class _BackgroundJob:
    """A response under way. ``held``: what it holds to its end. ``answer``: None until a model is known to be up."""

    asked: AskedBackground
    log: EventLog
    client: Client
    progress: RequestInProgress
    held: AsyncExitStack
    name: str
    answer: BackgroundAnswer | None = None
    task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.asked.running.id

    @property
    def owner(self) -> str:
        return self.asked.running.owner


class BackgroundResponses:
    """The owner of all responses of this server that are generated in the background.

    With a store in a file, one server at a time continues those in it; with a database, each those that another one
    has left. See `SoleWorker`.
    """

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._jobs: dict[str, _BackgroundJob] = {}
        self._of_owners: Counter[str] = Counter()
        # When this server may take back what it has passed on, by the ids of responses.
        self._passed_on: dict[str, float] = {}
        self._ending = False
        place = app[STATE].store.place
        lock = place.with_name(f"{place.name}-background") if isinstance(place, Path) else place
        self._worker = SoleWorker(lock, app[ENDING], Work(self._continue_all, self._leave))

    async def start(self) -> None:
        """Continue what is in the store, at once if no other server does."""
        await self._worker.start()

    async def close(self) -> None:
        """End all tasks. What is in a file can be continued later."""
        await self._worker.close()

    async def _leave(self) -> None:
        self._ending = True
        await end_tasks([job.task for job in self._jobs.values() if job.task is not None])
        store = self._app[STATE].store
        if store.is_shared:
            with suppress(StoreError):  # Others see it by the end of this one.
                await store.on_jobs(lambda jobs: jobs.leave())

    def log_of(self, owner: str, response_id: str) -> EventLog | None:
        """Return the events of a response under way; None if the owner has none of this id."""
        job = self._jobs.get(response_id)
        return job.log if job is not None and job.owner == owner else None

    async def begin(
        self, request: web.Request, body: ResponseRequest, response_id: str | None = None
    ) -> tuple[ResponseObject, EventLog]:
        """Store a new response and generate it. Return it as it is queued, and its events.

        ``response_id``: one that its client knows how to find. Raises RequestError, EngineError, StoreError.
        """
        state, owner = self._app[STATE], owner_of(request)
        has_priority = body.priority is not None or PRIORITY_HEADER in request.headers
        body = with_window(body, has_priority=has_priority)
        async with AsyncExitStack() as held:
            held.enter_context(self._counting(owner))
            turn = await held.enter_async_context(
                begun_turn(state.store, self._app[RUNNING], owner, body, extends=True)
            )
            head = new_response(body, turn)
            if response_id is not None:
                if self._app[RUNNING].find(owner, response_id) is not None:
                    raise RepeatedRequestError
                head = msgspec.structs.replace(head, id=response_id)
            life_s = state.limits.background_life_s
            asked = AskedBackground(body, turn, self._app[REMEMBERED], life_s=life_s, head=head)
            note_skipped(self._app, asked)
            held.enter_context(self._app[RUNNING].listing(asked.running))
            answer, progress = await admitted(request, asked, held.enter_context(ExitStack()))
            assert isinstance(answer, BackgroundAnswer)
            progress.trace = NO_TRACE  # That of the request ends with its reply.
            log = EventLog(state.store, asked.running.id)
            try:
                await answer.begin(log, asked.record, state.limits.max_background)
            finally:
                queued = answer.response()
                # What is stored is generated, also if its client has left meanwhile. If this server ends, another does.
                if log.following and not self._ending:
                    self._generate(
                        _BackgroundJob(
                            asked=asked,
                            log=log,
                            client=request[CLIENT],
                            progress=progress,
                            held=held.pop_all(),
                            name=answer.model,
                            answer=answer,
                        )
                    )
                else:
                    log.close()
        return queued, log

    @contextmanager
    def _counting(self, owner: str) -> Iterator[None]:
        """Count one response more of ``owner``. Raises BackgroundLimitError, EndingError."""
        limit = self._app[STATE].limits.max_background
        if self._ending:
            raise EndingError
        if self._of_owners[owner] >= limit:
            raise BackgroundLimitError(limit)
        with self._counted(owner):
            yield

    @contextmanager
    def _counted(self, owner: str) -> Iterator[None]:
        self._of_owners[owner] += 1
        try:
            yield
        finally:
            self._of_owners[owner] -= 1
            if not self._of_owners[owner]:
                del self._of_owners[owner]

    async def _continue_all(self) -> None:
        """Continue the responses in the store that no other server continues; cancel those of which clients ask it."""
        state, now = self._app[STATE], time.monotonic()
        self._passed_on = {job: until for job, until in self._passed_on.items() if until > now}
        try:
            for known in await state.store.jobs_under_way(tuple(self._passed_on)):
                running = self._app[RUNNING].find(known.owner, known.id)
                if running is not None:
                    if known.cancelled:
                        running.cancel()
                else:
                    # It may have ended, or have been deleted, while others were begun.
                    job = await state.store.job(known.owner, known.id)
                    if job is not None and not job.ended:
                        await self._continue(job)
        except StoreError as error:
            if not error.is_away:
                _log.error("responses in the background cannot be read, so they do not go on")

    async def _continue(self, job: Job) -> None:
        """Continue a response; end it if that is not possible. Raises StoreError."""
        state = self._app[STATE]
        head = msgspec.json.decode(job.response, type=ResponseObject)
        log = EventLog(state.store, job.id, job.next)
        async with AsyncExitStack() as held:
            try:
                record = msgspec.json.decode(job.request, type=JobRecord)
                client = client_named(state, job.owner)
                if client is None:
                    raise InvalidKeyError
                before = BegunBefore(items=tuple(record.items), position=job.position)
                turn = await held.enter_async_context(
                    begun_turn(state.store, self._app[RUNNING], job.owner, record.body, extends=False, before=before)
                )
                life_s = state.limits.background_life_s
                asked = AskedBackground(
                    record.body, turn, self._app[REMEMBERED], life_s=life_s, record=record, head=head
                )
            except (RequestError, msgspec.MsgspecError) as error:
                _log.warning("response %s in the background cannot go on: %s", job.id, error)
                await self._end(job.owner, log, failed_end(head, error, job.next))
                return
            held.enter_context(self._app[RUNNING].listing(asked.running))
            held.enter_context(client.permits.take(1))
            progress = RequestInProgress(
                request_id=record.request_id, owner=job.owner, route=ROUTE, arrived=time.monotonic()
            )
            held.enter_context(self._app[IN_PROGRESS].listing(progress))
            held.enter_context(self._counted(job.owner))
            _log.info("response %s in the background goes on", job.id)
            self._generate(
                _BackgroundJob(
                    asked=asked,
                    log=log,
                    client=client,
                    progress=progress,
                    held=held.pop_all(),
                    name=record.body.model or "",
                )
            )

    def _generate(self, job: _BackgroundJob) -> None:
        self._jobs[job.id] = job
        job.task = asyncio.create_task(self._serve(job))

    async def _serve(self, job: _BackgroundJob) -> None:
        async with job.held:
            try:
                await self._attempts(job)
            except LostJobError:
                _log.info("response %s in the background was deleted, or goes on at another server", job.id)
            except Exception as error:  # noqa: BLE001  whatever a bug raises
                if isinstance(error, EngineError | RequestError | StoreError):
                    # No client may be there to read it.
                    _log.warning("response %s in the background failed: %s", job.id, error)
                else:
                    _log.exception("response %s in the background failed", job.id)
                await self._end_job(job, error)
            finally:
                job.log.close()
                del self._jobs[job.id]

    async def _attempts(self, job: _BackgroundJob) -> None:
        """Generate a response, again and again while no shard of its model is up, from its last token that is stored.

        If no model here has its name, another server may have the model, or have loaded the adapter. Raises
        EngineError, RequestError, StoreError.
        """
        running = job.asked.running
        while True:
            try:
                if job.answer is None:
                    await running.unless_stopped(self._prepare(job))
                if job.answer is None:
                    await self._end_job(job, None)
                    return
                async with job.progress.abortable():
                    await job.answer.generate(job.log, job.asked.record, job.asked.saved)
            except (NoShardError, UnknownModelError) as error:
                if isinstance(error, ModelReplacedError) or time.time() >= job.asked.record.deadline:
                    raise
            else:
                return
            if await self._passes_on(job):
                return
            await asyncio.sleep(_RETRY_S)
            job.answer = None

    async def _passes_on(self, job: _BackgroundJob) -> bool:
        """Leave a response to other servers if none of the known models has its name. Raises StoreError."""
        state = self._app[STATE]
        names = {name for engine in state.fleet.engines for name in (engine.model.name, *engine.model.adapters)}
        if not state.store.is_shared or not names or job.name in names:
            return False
        _log.info("response %s in the background is left to a server that has %s", job.id, job.name)
        self._passed_on[job.id] = time.monotonic() + _PASSED_ON_S
        await state.store.on_jobs(lambda jobs: jobs.pass_on(job.id))
        return True

    async def _prepare(self, job: _BackgroundJob) -> None:
        """Make the answer of a job, after what is stored. Raises EngineError, RequestError, StoreError."""
        state = self._app[STATE]
        await job.asked.extend(self._app[RUNNING])
        TEXT_SENDER.set(TextSender(tenant=job.client.key.tenant))
        sender = Sender(key=job.client.key, headers={}, request_id=job.progress.request_id)
        context = await sender_context(state, sender, job.name)
        if job.name not in (context.model.name, context.adapter):
            # A single model answers to all names, and the right one has not joined yet.
            raise NoShardError("another model is up", model=job.name)
        if job.progress.model is None:
            job.held.enter_context(state.permits.of(context.model.name).take(1))
        tokens, feedback = await state.store.tokens(job.id)
        # Only now, so that until a shard is up, clients see the output so far.
        job.asked.again(Saved(tokens=tokens, feedback=feedback, following=job.log.following))
        answer = await job.asked.validate(context)
        job.progress.begin(context.served, answer)
        job.answer = answer

    async def _end_job(self, job: _BackgroundJob, error: Exception | None) -> None:
        """Store the end of a response that is not a turn. ``error``: None if it was cancelled.

        A store that refuses it, as one whose disk is full, is asked again until it takes it: nothing else would end the
        response before this server starts again.
        """
        store, end = self._app[STATE].store, job.asked.ended(error, job.log.following)
        if await self._end(job.owner, job.log, end) or store.is_shared:
            return
        job.log.close()
        while True:
            await asyncio.sleep(_RETRY_S)
            with suppress(StoreError):
                await store.commit(job.owner, Transaction(ended=end))
                return

    async def _end(self, owner: str, log: EventLog, end: JobEnd) -> bool:
        """Store the end of a response. Return False if the store refuses it."""
        store = self._app[STATE].store
        try:
            await log.record(end.step, store.commit(owner, Transaction(ended=end)))
        except LostJobError:
            _log.info("response %s in the background was deleted, or ends at another server", end.id)
        except StoreError:
            # A server may continue it later, and does not know of this event. One that shares a database soon does.
            if not store.is_shared:
                log.show(end.step.events)
            return False
        return True


BACKGROUND = web.AppKey("background", BackgroundResponses)
