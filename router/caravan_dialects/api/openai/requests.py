"""The requests of an API key that are in progress: described in OpenAI's form of lists, and controlled."""

import time
from collections.abc import Iterable
from typing import Literal

import msgspec

from caravan_dialects.api.generation.in_progress import RequestInProgress
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.generation.schema import NoEffect
from caravan_proto.messages.adapters import adapter_name
from caravan_scheduler.core.generation import GenerationState
from caravan_scheduler.core.recomputed import Reason

# A request has the first of these states that any of its generations has.
_ORDER = (GenerationState.RUNNING, GenerationState.PREFILLING, GenerationState.SWAPPED, GenerationState.QUEUED)


class PromptDifference(msgspec.Struct, frozen=True):
    """Where a prompt goes on otherwise than the earlier one that begins alike.

    ``exact``: ``token`` is the first that differs. Else one of the 16 tokens from there on is: the earlier tokens are
    gone.
    """

    token: int
    exact: bool


class ComputedPart(msgspec.Struct, frozen=True):
    """``tokens`` of a prompt from ``start`` on that were not cached, for one reason."""

    reason: Reason
    start: int
    tokens: int


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    """``cached_tokens``: the first tokens of the prompt, which came from the cache.

    ``computed``: why the others did not. ``fetched``: what is cached was copied from another shard for it.
    ``first_difference``: null if no earlier prompt of the API key begins alike and differs.
    """

    cached_tokens: int
    fetched: bool
    first_difference: PromptDifference | None
    computed: list[ComputedPart]


class GenerationStatus(msgspec.Struct, frozen=True):
    """One candidate of one prompt. ``cache``: null until it has started."""

    state: GenerationState
    prompt_tokens: int
    generated_tokens: int
    cache: CacheUse | None


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A request in progress.

    ``id``: its ``X-Request-Id``. ``arrived``: Unix time in seconds. ``state``: the most advanced state of its
    generations. Each prompt counts once in ``prompt_tokens``. ``session``: null if nothing names one. ``model`` (or
    adapter), ``priority`` (the highest of all prompts), ``session`` and ``prompt_tokens`` are null, and ``generations``
    is empty, until the body has been validated.
    """

    id: str
    object: str
    route: str
    model: str | None
    arrived: float
    state: GenerationState
    priority: int | None
    session: str | None
    prompt_tokens: int | None
    generated_tokens: int
    generations: list[GenerationStatus]


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """llama-server's. ``id``: that of a chat completion, as its chunks have it, or the request's ``X-Request-Id``.

    ``action``: "reasoning_end" lets the reasoning end now, and the answer follow.
    """

    id: str
    action: Literal["reasoning_end"]
    model: NoEffect = None


class Controlled(msgspec.Struct, frozen=True, omit_defaults=True):
    """``message``: why it was no success."""

    success: bool
    message: str = ""


def end_reasoning(entries: Iterable[RequestInProgress], reply_id: str) -> Controlled:
    """End the reasoning of those of ``entries`` that ``reply_id`` names."""
    found = [entry for entry in entries if reply_id and reply_id in (entry.reply_id, entry.request_id)]
    if not found:
        return Controlled(False, "no request of this id is in progress")
    ended = [entry.end_thoughts() for entry in found]
    if not any(ended):
        return Controlled(False, "the request has no reasoning that can be ended: it needs `reasoning_control`: true")
    return Controlled(True)


class RequestList(msgspec.Struct, frozen=True):
    """Requests in the order of their arrival."""

    object: str
    data: list[RequestStatus]


def request_list(entries: Iterable[RequestInProgress]) -> RequestList:
    """Describe requests."""
    return RequestList("list", [_status(entry) for entry in entries])


def _status(entry: RequestInProgress) -> RequestStatus:
    specs = [spec for valid in entry.valid for spec in valid.specs]
    generations = [GenerationStatus(run.state, len(run.spec.prompt), run.tokens, _cache(run)) for run in entry.runs]
    return RequestStatus(
        id=entry.request_id,
        object="request",
        route=entry.route,
        model=None if entry.model is None else adapter_name(specs[0].adapter) or entry.model.engine.model.name,
        arrived=round(time.time() - (time.monotonic() - entry.arrived), 3),
        state=_most_advanced({generation.state for generation in generations}),
        priority=max((spec.priority for spec in specs), default=None),
        session=(specs[0].session or None) if specs else None,
        prompt_tokens=sum(len(valid.prompt) for valid in entry.valid) if specs else None,
        generated_tokens=sum(generation.generated_tokens for generation in generations),
        generations=generations,
    )


def _cache(run: Run) -> CacheUse | None:
    if (why := run.recomputed) is None:
        return None
    at = why.differs_at
    return CacheUse(
        cached_tokens=run.cached_tokens,
        fetched=why.was_moved,
        first_difference=None if at is None else PromptDifference(at, why.is_exact),
        computed=[ComputedPart(part.reason, part.start, part.tokens) for part in why.parts],
    )


def _most_advanced(states: set[GenerationState]) -> GenerationState:
    """Return the state of a request whose generations have ``states``: queued until it has any."""
    if states == {GenerationState.ENDED}:
        return GenerationState.ENDED
    return next((state for state in _ORDER if state in states), GenerationState.QUEUED)
