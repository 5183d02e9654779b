"""Responses that are generated in the background: they go on without a client, on other shards and in other routers.

Every event is a function of the tokens so far. So a router that finds the tokens of a response in the store makes the
same events again, throws them away, and goes on with the next token.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec

from caravan_dialects.api.errors import BackgroundLimitError, ConversationBusyError, RepeatedRequestError
from caravan_dialects.api.generation.comparison import RememberedRequests
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import SavedRun
from caravan_dialects.api.openai.chat.output import ChatOutput
from caravan_dialects.api.openai.chat.validation import ValidChat
from caravan_dialects.api.openai.responses.event_log import EventLog
from caravan_dialects.api.openai.responses.output_parts import Plan
from caravan_dialects.api.openai.responses.reply import (
    AskedResponse,
    Delivery,
    PartialResponse,
    ResponseAnswer,
    new_response,
)
from caravan_dialects.api.openai.responses.rules import background_needs_store_error, needs_background_error
from caravan_dialects.api.openai.responses.running import RunningResponse, RunningResponses
from caravan_dialects.api.openai.responses.schema import ResponseObject, ResponseRequest
from caravan_dialects.api.openai.responses.tool_loop import LoopState, within
from caravan_dialects.api.openai.responses.tools import offered_tools
from caravan_dialects.api.openai.responses.turn import Turn
from caravan_dialects.auth.key import MIN_PRIORITY
from caravan_dialects.conversations.nodes import Added, Job, JobEnd, Json, Node, Step
from caravan_dialects.conversations.store import Store
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.errors import DeadlineError, ModelReplacedError
from caravan_scheduler.core.generation import Continued
from caravan_scheduler.core.tokens import GeneratedToken

WINDOWS_S = {"2h": 2 * 3600.0, "8h": 8 * 3600.0}
# `PartialResponse.announce_queued` makes so many; the next event says that the response is no longer queued.
_QUEUED_EVENTS = 2


class JobRecord(msgspec.Struct, kw_only=True):
    """What is needed to continue a response.

    ``body``: the request without its input, with the values that were found in headers or drawn. ``items``: its input.
    ``deadline``: Unix time in seconds at which the response ends. ``fingerprint``, ``vocabulary``: of the model and its
    vocabulary, "" if that is not known. ``loop``: None before the first call.
    """

    body: ResponseRequest
    items: list[Json]
    deadline: float
    fingerprint: str
    vocabulary: str
    request_id: str
    loop: LoopState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The tokens of a response so far, and the number of its next event."""

    tokens: Sequence[GeneratedToken] = ()
    feedback: float | None = None
    following: int = 0


def check_background(body: ResponseRequest) -> None:
    """Raises ValidationError."""
    window = None if body.background_options is None else body.background_options.completion_window
    if not body.background:
        if window in WINDOWS_S:
            raise needs_background_error(window)
    elif body.store is False:
        raise background_needs_store_error()


def with_window(body: ResponseRequest, *, has_priority: bool) -> ResponseRequest:
    """Return ``body`` with the priority that its window has: one that is not urgent goes after all others.

    ``has_priority``: whether the request names one.
    """
    options = body.background_options
    if has_priority or options is None or options.completion_window not in WINDOWS_S:
        return body
    return msgspec.structs.replace(body, priority=MIN_PRIORITY)


def deadline_of(body: ResponseRequest, life_s: float, timeout_s: float, now: float) -> float:
    """Return the Unix time at which a response ends. ``life_s``: how long any may take. ``timeout_s``: what it asks."""
    window = None if body.background_options is None else body.background_options.completion_window
    return now + min(life_s, timeout_s, WINDOWS_S.get(window or "", life_s))


async def _show_later() -> None:
    """Events are shown once they are stored."""


class _Steps:
    """Stores a response step by step. ``record``: what is needed to continue it."""

    def __init__(self, log: EventLog, store: Store, partial: PartialResponse, record: JobRecord) -> None:
        self._log = log
        self._store = store
        self._partial = partial
        # The first event that is not stored.
        self._first = log.following
        self.record = record

    async def begin(self, turn: Turn, most: int) -> None:
        """Store the response as queued. ``most``: that an owner may have.

        Raises StoreError, BackgroundLimitError, RepeatedRequestError.
        """
        head = self._partial.head
        request, response = msgspec.json.encode(self.record), msgspec.json.encode(head)
        job = Job(id=head.id, owner=turn.owner, request=request, response=response, position=turn.chain.position)
        step = self._step()
        await self._log.record(step, _added(self._store.add_job(job, step, most), most))

    async def append(self, tokens: Sequence[GeneratedToken], feedback: float | None) -> None:
        """Store events, and the tokens that they tell of. Raises StoreError."""
        step = self._step(tokens, feedback)
        await self._log.record(step, self._store.append(self._partial.head.id, step))

    async def replace_tokens(self, loop: LoopState) -> None:
        """Store events, and ``loop`` in place of all tokens so far. Raises StoreError."""
        self.record.loop = loop
        step, request = self._step(), msgspec.json.encode(self.record)
        await self._log.record(step, self._store.replace_tokens(self._partial.head.id, step, request))

    async def end(self, turn: Turn, node: Node) -> None:
        """Store the whole response. Raises StoreError, RequestError."""
        step = self._step()
        await self._log.record(step, turn.commit(node, JobEnd(id=node.id, step=step)))

    def _step(self, tokens: Sequence[GeneratedToken] = (), feedback: float | None = None) -> Step:
        """Return what has come since the last call."""
        events = tuple(self._partial.take_unsent())
        step = Step(first=self._first, events=events, tokens=tuple(tokens), feedback=feedback)
        self._first = self._partial.next
        return step


async def _added(adding: Awaitable[Added], most: int) -> None:
    """Raises StoreError, BackgroundLimitError, RepeatedRequestError."""
    added = await adding
    if added is Added.FULL:
        raise BackgroundLimitError(most)
    if added is Added.KNOWN:
        # Another server began it at the same time.
        raise RepeatedRequestError


class BackgroundAnswer(ResponseAnswer):
    """Answers one turn, step by step: each is stored before anybody sees it."""

    def __init__(self, turn: Turn, partial: PartialResponse, running: RunningResponse, plan: Plan) -> None:
        super().__init__(turn, partial, running, plan)
        # While it is generated.
        self._steps: _Steps | None = None
        self._saved = Saved()

    @property
    def _storing(self) -> _Steps:
        assert self._steps is not None
        return self._steps

    @property
    def model(self) -> str:
        """Name of the model, or of its adapter."""
        return self._partial.head.model

    async def begin(self, log: EventLog, record: JobRecord, most: int) -> None:
        """Store the response as queued. ``most``: that an owner may have.

        Raises StoreError, BackgroundLimitError, RepeatedRequestError.
        """
        self._partial.announce_queued()
        await _Steps(log, self._turn.store, self._partial, record).begin(self._turn, most)

    def begin_again(self, saved: Saved, loop: LoopState | None) -> None:
        """Announce the response as it was announced before, without anybody seeing it."""
        self._partial.announce_queued()
        if loop is not None:
            self._partial.start()
            self._parts.earlier = loop.usage
        self._partial.take_unsent()
        self._partial.next = saved.following

    async def generate(self, log: EventLog, record: JobRecord, saved: Saved) -> None:
        """Generate the rest of the response, after ``saved``. Raises EngineError, RequestError, StoreError."""
        self._saved = saved
        self._steps = _Steps(log, self._turn.store, self._partial, record)
        await self._respond((), Delivery(read=self._read_on, show=_show_later, save=self._save))

    async def _finish(self) -> None:
        self._partial.start()
        self._running.note_end()
        self._complete()
        self._partial.announce_end()
        await self._storing.end(self._turn, self.node())
        self._running.ended.set()

    def _submit(self, held: ExitStack) -> None:
        run = held.enter_context(self.submit(SavedRun, self._parts.chat.request))
        output = self._parts.begin(run)
        # Those of the part that was interrupted.
        tokens, self._saved = self._saved.tokens, Saved()
        following = self._partial.next
        for pieces in run.replay(tokens):
            self._partial.start()
            self._parts.take(pieces, output.push(pieces))
        if tokens:
            self._partial.take_unsent()
            self._partial.next = following

    async def _save(self) -> None:
        """Store the items so far, in place of the tokens that they are made of."""
        parts, loop = self._parts, self._plan.loop
        assert loop is not None
        self._partial.start()
        if parts.output is not None:
            assert isinstance(parts.output.run, SavedRun)
            parts.output.run.take_unsaved()
        exact = parts.exact_tokens()
        state = LoopState(
            items=self._partial.items.items,
            usage=parts.usage(),
            calls=loop.calls,
            token_ids=[*exact.token_ids],
            fingerprint=exact.fingerprint,
        )
        await self._storing.replace_tokens(state)

    async def _read_on(self, output: ChatOutput) -> None:
        run = output.run
        assert isinstance(run, SavedRun)
        try:
            async for ready in run:
                self._partial.start()
                for pieces in ready:
                    self._parts.take(pieces, output.push(pieces))
                # What ends a part is stored with its end.
                if run.finish is None:
                    await self._storing.append(*run.take_unsaved())
        except DeadlineError as error:
            held = run.cut_off(error)
            self._parts.take(held, output.push(held))


def _decided(body: ResponseRequest, model: str, chat: ValidChat) -> ResponseRequest:
    """Return ``body`` without its input, with all that was found in headers, drawn or left to defaults."""
    spec = chat.request.specs[0]
    return msgspec.structs.replace(
        body,
        model=model,
        input=None,
        seed=spec.sampling.seed,
        priority=spec.priority,
        session_id=spec.session or None,
        speculate=spec.max_draft_tokens,
        timeout=None,
    )


@dataclass(slots=True)
class _Basis:
    """How long a response may take, what is needed to continue it once its request is valid, and its first part.

    ``extends``: whether others are kept from changing the conversation that it extends, if there is one.
    """

    life_s: float
    record: JobRecord | None
    saved: Saved = Saved()
    extends: bool = False


class AskedBackground(AskedResponse):
    """One turn that is answered in the background. It can be seen from the start on, also if it waits for a shard."""

    def __init__(
        self,
        body: ResponseRequest,
        turn: Turn,
        remembered: RememberedRequests,
        *,
        life_s: float,
        record: JobRecord | None = None,
        head: ResponseObject | None = None,
    ) -> None:
        """``life_s``: how long the response may take. ``record`` and ``head``: those of one that goes on.

        Raises ValidationError.
        """
        super().__init__(body, turn, remembered, head or new_response(body, turn))
        self._basis = _Basis(life_s, record, extends=record is None)
        self.running.begin(self)

    @property
    def record(self) -> JobRecord:
        """What is needed to continue the response, whose request is valid."""
        assert self._basis.record is not None, "the request is not valid yet"
        return self._basis.record

    @property
    def saved(self) -> Saved:
        """What there was of the response when it began, or began anew."""
        return self._basis.saved

    def response(self) -> ResponseObject:
        return self._partial.response()

    def node(self) -> Node:
        items = self._turn.items
        return Node(id=self._partial.head.id, parent=self._turn.chain.position, items=items, inputs=len(items))

    def again(self, saved: Saved) -> None:
        """Begin anew, after what is ``saved``."""
        self._begin_anew("queued")
        self._basis.saved = saved

    async def extend(self, running: RunningResponses) -> None:
        """Keep others from changing the conversation that a response extends which goes on. Wait while others do.

        Raises ConversationBusyError at the response's deadline.
        """
        head = self._turn.head
        if head is None or self._basis.extends:
            return
        try:
            async with asyncio.timeout(self.record.deadline - time.time()):
                self._turn.held.enter_context(await running.extending_next(self._turn.owner, head.id))
        except TimeoutError:
            raise ConversationBusyError from None
        self._basis.extends = True

    async def validate(self, context: Context) -> BackgroundAnswer:
        before = self._basis.record
        state = None if before is None else before.loop
        if state is not None:
            self._partial.items.restore(state.items)
        plan = await self._validated(context, state)
        saved, now = self.saved, time.time()
        if saved.tokens and not _are_same(self.record, context.model):
            raise ModelReplacedError(context.model.name)
        if before is None:
            deadline = deadline_of(self._body, self._basis.life_s, plan.chat.request.specs[0].timeout_s, now)
        else:
            deadline = before.deadline
        plan = replace(plan, chat=_continued(plan.chat, saved, deadline - now))
        answer = BackgroundAnswer(self._turn, self._partial, self.running, plan)
        self._basis.record = JobRecord(
            body=_decided(self._body, answer.model, plan.chat),
            items=[*self._turn.items],
            deadline=deadline,
            fingerprint=context.model.fingerprint,
            vocabulary=context.model.vocabulary_fingerprint,
            request_id=context.sender.request_id,
            loop=state,
        )
        if saved.following:
            answer.begin_again(saved, state)
        self.running.begin(answer)
        return answer

    def ended(self, error: Exception | None, following: int) -> JobEnd:
        """Return the end of a response that is not stored as a turn. ``error``: None if it was cancelled.

        ``following``: number of its next event.
        """
        self.running.note_end()
        return _end_of(self._partial, error, following)


def failed_end(head: ResponseObject, error: Exception, following: int) -> JobEnd:
    """Return the end of a response that cannot go on."""
    return _end_of(PartialResponse(head, offered_tools((), ()), streamed=True), error, following)


def stored_response(job: Job) -> bytes:
    """Return the JSON of a response of another server as the store shows it: while it is generated, without output.

    Empty if it has ended as a node.
    """
    if job.ended or job.next <= _QUEUED_EVENTS:
        return job.response
    head = msgspec.json.decode(job.response, type=ResponseObject)
    return msgspec.json.encode(msgspec.structs.replace(head, status="in_progress"))


def _end_of(partial: PartialResponse, error: Exception | None, following: int) -> JobEnd:
    partial.take_unsent()
    partial.next = following
    if error is None:
        partial.head.status = "cancelled"
        partial.head.output = partial.items.items
        partial.announce_end()
    else:
        partial.fail(error)
    step = Step(first=following, events=tuple(partial.take_unsent()))
    return JobEnd(id=partial.head.id, step=step, response=msgspec.json.encode(partial.response()))


def _are_same(record: JobRecord, model: ModelFacts) -> bool:
    """Whether tokens of the model of ``record`` mean the same for ``model``."""
    return record.fingerprint == model.fingerprint or record.vocabulary == model.vocabulary_fingerprint != ""


def _continued(chat: ValidChat, saved: Saved, left_s: float) -> ValidChat:
    chat = within(chat, left_s)
    [spec] = chat.request.specs
    if saved.tokens:
        ids = tuple(token.token_id for token in saved.tokens)
        stopping = replace(spec.stopping, max_new_tokens=max(spec.stopping.max_new_tokens, len(ids) + 1))
        spec = replace(spec, stopping=stopping, continued=Continued(token_ids=ids, feedback=saved.feedback))
    return replace(chat, request=replace(chat.request, specs=(spec,)))
