"""``/v1/organization/usage``: what API keys have used, in OpenAI's form of buckets. A bucket is a day in UTC."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from caravan_dialects.api.errors import ForbiddenError
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.paging import page_size
from caravan_dialects.auth.key import ApiKey
from caravan_dialects.auth.usage import DAY_S, Account, Counts

_WIDTH = "1d"
_DEFAULT_BUCKETS, MOST_BUCKETS = 7, 31
# The fields of an account by the parameter that keeps them apart, and by the one that names those that count.
_GROUPS = {"api_key_id": "key", "session": "session", "model": "model"}
_FILTERS = {"api_key_ids": "key", "sessions": "session", "models": "model"}
_KNOWN = frozenset({"start_time", "end_time", "bucket_width", "group_by", "limit", "page", *_FILTERS})
# Of a time or a page.
_MOST_DIGITS = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """The days that are asked for, those of the page first. ``groups``, ``only``: see `Accounts.read`."""

    days: range
    page: range
    groups: tuple[str, ...]
    only: dict[str, list[str]]


class CompletionsUsage(msgspec.Struct, frozen=True, kw_only=True):
    """``input_tokens`` include ``input_cached_tokens``, ``output_tokens`` accepted drafts.

    Of Caravan only: ``session``; ``recomputed_tokens``, computed again since their cells had been needed or their shard
    was lost; ``draft_tokens``, of which ``accepted_draft_tokens`` became output. Fields that are not grouped by are
    null.
    """

    object: str = "organization.usage.completions.result"
    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    num_model_requests: int
    recomputed_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    api_key_id: str | None
    session: str | None
    model: str | None
    project_id: None = None
    user_id: None = None
    batch: None = None


class EmbeddingsUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Texts that were embedded, scored or ranked. Fields that are not grouped by are null."""

    object: str = "organization.usage.embeddings.result"
    input_tokens: int
    num_model_requests: int
    api_key_id: str | None
    model: str | None
    project_id: None = None
    user_id: None = None


Result = TypeVar("Result")


class UsageBucket(msgspec.Struct, Generic[Result], frozen=True, kw_only=True):
    """A day. The times are in seconds since 1970; the end is exclusive."""

    object: str = "bucket"
    start_time: int
    end_time: int
    results: list[Result]


class UsagePage(msgspec.Struct, Generic[Result], frozen=True, kw_only=True):
    """``next_page``: the value of ``page`` for the next days, null if there are none."""

    object: str = "page"
    data: list[UsageBucket[Result]]
    has_more: bool
    next_page: str | None


def usage_query(given: Iterable[tuple[str, str]], key: ApiKey, now_s: float) -> UsageQuery:
    """Read the parameters of a URL. A key that is no operator's sees what it has used itself.

    Raises ValidationError, ForbiddenError.
    """
    lists: dict[str, list[str]] = {}
    for name, value in given:
        # OpenAI's packages send lists with brackets.
        lists.setdefault(name.removesuffix("[]"), []).append(value)
    for name, values in lists.items():
        if name not in _KNOWN:
            raise unsupported_field_error(f"{name:.80}", "ask without it: usage is not kept by it", values[-1])
    if (width := lists.get("bucket_width", [_WIDTH])[-1]) != _WIDTH:
        raise unsupported_field_error("bucket_width", f"use `{_WIDTH}`", width)
    groups = lists.get("group_by", [])
    for group in groups:
        if group not in _GROUPS:
            raise unsupported_field_error("group_by", f"use {', '.join(_GROUPS)}", group)
    today = int(now_s // DAY_S)
    limit = page_size({name: values[-1] for name, values in lists.items()}, _DEFAULT_BUCKETS, MOST_BUCKETS)
    end_s = _number(lists, "end_time", (today + 1) * DAY_S)
    stop = min(today + 1, -(-end_s // DAY_S))
    start = min(stop, _number(lists, "start_time", max(0, stop - limit) * DAY_S) // DAY_S)
    first = max(start, _number(lists, "page", start))
    only = {field: lists[name] for name, field in _FILTERS.items() if lists.get(name)}
    if not key.operator:
        own = [key.tenant.name]
        if only.get("key", own) != own:
            raise ForbiddenError
        only["key"] = own
    return UsageQuery(
        days=range(start, stop),
        page=range(first, min(stop, first + limit)),
        groups=tuple(_GROUPS[group] for group in groups),
        only=only,
    )


def _number(lists: dict[str, list[str]], name: str, default: int) -> int:
    if name not in lists:
        return default
    text = lists[name][-1]
    if not (text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS):
        raise unsupported_field_error(name, "use a whole number", text)
    return int(text)


def usage_page(
    query: UsageQuery,
    rows: Sequence[tuple[Account, Counts]],
    result_of: Callable[[UsageQuery, Account, Counts], Result],
) -> UsagePage[Result]:
    """Return the buckets of the page's days, those without usage included."""
    has_more = query.page.stop < query.days.stop
    return UsagePage(
        data=[
            UsageBucket(
                start_time=day * DAY_S,
                end_time=(day + 1) * DAY_S,
                results=[result_of(query, *row) for row in rows if row[0].day == day],
            )
            for day in query.page
        ],
        has_more=has_more,
        next_page=str(query.page.stop) if has_more else None,
    )


def completions_usage(query: UsageQuery, account: Account, counts: Counts) -> CompletionsUsage:
    """Return what was generated."""
    return CompletionsUsage(
        input_tokens=counts.prompt,
        input_cached_tokens=counts.cached,
        output_tokens=counts.output,
        num_model_requests=counts.requests,
        recomputed_tokens=counts.recomputed,
        draft_tokens=counts.drafted,
        accepted_draft_tokens=counts.accepted,
        api_key_id=account.key if "key" in query.groups else None,
        session=account.session if "session" in query.groups else None,
        model=account.model if "model" in query.groups else None,
    )


def embeddings_usage(query: UsageQuery, account: Account, counts: Counts) -> EmbeddingsUsage:
    """Return what was embedded."""
    return EmbeddingsUsage(
        input_tokens=counts.prompt,
        num_model_requests=counts.requests,
        api_key_id=account.key if "key" in query.groups else None,
        model=account.model if "model" in query.groups else None,
    )
