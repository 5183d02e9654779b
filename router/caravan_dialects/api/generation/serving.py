"""Options of every generating request: tenant, session, priority, deadline and cache namespace."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from caravan_dialects.api.generation.checks import check_positive, check_range
from caravan_dialects.api.generation.rules import cache_salt_error, header_error, priority_error, session_id_error
from caravan_dialects.api.generation.schema import ServingFields
from caravan_dialects.api.limits import Limits
from caravan_dialects.auth.key import MAX_PRIORITY, MIN_PRIORITY, ApiKey
from caravan_scheduler.core.engine import TextSender
from caravan_scheduler.core.generation import Tenant

PRIORITY_HEADER = "X-Priority"
TIMEOUT_HEADER = "X-Request-Timeout"
SPECULATE_HEADER = "X-Speculate"

MAX_SESSION_CHARACTERS = 256
# Those that agents send with every request, in the order in which they count: of Claude Code; of OpenCode, AIPerf and
# OpenRouter's clients; of Codex, whose sub-agents are threads of one session.
SESSION_HEADERS = (
    "X-Claude-Code-Session-Id",
    "X-Session-Affinity",
    "X-Session-Id",
    "Session-Id",
    "Session_id",
    "Thread-Id",
)

_FIELDS = (
    "priority",
    "service_tier",
    "timeout",
    "cache_salt",
    "session_id",
    "speculate",
    "prompt_cache_options",
    "prompt_cache_retention",
)
# In seconds. OpenAI drops what it has in memory after 5 to 10 minutes.
_LIFETIMES = {"5m": 300.0, "30m": 1_800.0, "1h": 3_600.0, "12h": 43_200.0, "24h": 86_400.0}
_LIFETIMES |= {"in_memory": _LIFETIMES["5m"], "in-memory": _LIFETIMES["5m"]}
# Priorities of OpenAI's tiers, of which those that are not here have the default priority.
_TIERS = {"flex": -10, "priority": 10, "fast": 10, "scale": 10, "ultrafast": 20}
# Python's own readers also accept "1_0", "nan" and digits of other scripts.
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """What a trusted gateway says of a request in the headers of llm-d.

    ``fairness_id``: for whom the request is, which its client cannot change; "" if it does not say.
    ``queue_timeout_s``: the most that it may wait to start. ``notes``: its objective and its targets by name, for the
    trace alone: one that misses its target is answered late, not refused.
    """

    fairness_id: str = ""
    queue_timeout_s: float = math.inf
    notes: Mapping[str, str] = field(default_factory=dict)


NO_GATEWAY = Gateway()
FAIRNESS_HEADER = "x-llm-d-inference-fairness-id"
# Its value is a duration as Go writes it, such as 1m30.5s.
QUEUE_TIMEOUT_HEADER = "x-llm-d-inference-ttl"
_DURATION = r"([0-9]{1,9}(?:\.[0-9]{0,9})?)(ns|us|ms|s|m|h)"
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NOTES = {
    "objective": "x-llm-d-inference-objective",
    "slo_ttft_ms": "x-llm-d-slo-ttft-ms",
    "slo_tpot_ms": "x-llm-d-slo-tpot-ms",
}


def gateway_of(headers: Mapping[str, str]) -> Gateway:
    """Read the headers of a trusted gateway. Values that are too long, not printable or no duration are ignored."""

    def of(name: str) -> str:
        text = headers.get(name, "")
        return text if is_session_id(text) else ""

    notes = {name: text for name, header in _NOTES.items() if (text := of(header))}
    return Gateway(
        fairness_id=of(FAIRNESS_HEADER), queue_timeout_s=_queue_timeout_s(of(QUEUE_TIMEOUT_HEADER)), notes=notes
    )


def _queue_timeout_s(duration: str) -> float:
    if not re.fullmatch(f"(?:{_DURATION})+", duration):
        return math.inf
    # Zero is no limit, as for the gateway.
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(_DURATION, duration)) or math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The client of a request. ``headers`` stand in for fields that it left out.

    ``traceparent`` and ``request_id``: see `GenerationSpec`.
    """

    key: ApiKey
    headers: Mapping[str, str]
    gateway: Gateway = NO_GATEWAY
    traceparent: str = ""
    request_id: str = ""


class Serving(TypedDict):
    """The fields of a `GenerationSpec` that say how it is served, whatever it generates."""

    priority: int
    tenant: Tenant
    session: str
    namespace: str
    timeout_s: float
    queue_timeout_s: float
    traceparent: str
    max_draft_tokens: int
    request_id: str
    keep_s: float


def serving_of(fields: ServingFields, sender: Sender, limits: Limits) -> Serving:
    """Read body fields, and headers from clients that cannot send the fields; a field wins over its header.

    Raises ValidationError.
    """
    headers, key = sender.headers, sender.key
    namespace = namespace_of(key.tenant, fields.cache_salt, limits)
    return Serving(
        priority=_priority(fields.priority, headers.get(PRIORITY_HEADER), key, tier_of(fields)),
        tenant=key.tenant,
        session=_session(fields, sender),
        namespace=namespace,
        timeout_s=_timeout_s(fields.timeout, headers.get(TIMEOUT_HEADER)),
        queue_timeout_s=sender.gateway.queue_timeout_s,
        traceparent=sender.traceparent,
        max_draft_tokens=_max_draft_tokens(fields.speculate, headers.get(SPECULATE_HEADER), limits),
        request_id=sender.request_id,
        keep_s=_keep_s(fields),
    )


def is_session_id(text: str) -> bool:
    """Whether ``text`` may name a session: it is kept while the session has requests, and it is shown."""
    return 0 < len(text) <= MAX_SESSION_CHARACTERS and text.isprintable()


def _session(fields: ServingFields, sender: Sender) -> str:
    """Return the name of the session; "" if nothing names one. What others than our own field name may be anything."""
    own, headers = fields.session_id, sender.headers
    if own is not None and not is_session_id(own):
        raise session_id_error(MAX_SESSION_CHARACTERS, own)
    if sender.gateway.fairness_id:
        return sender.gateway.fairness_id
    if own is not None:
        return own
    for name in SESSION_HEADERS:
        if (given := headers.get(name)) is not None and is_session_id(given):
            return given
    # Bodies of TGI's routes have none.
    return first_session(getattr(fields, "prompt_cache_key", None)) or ""


def first_session(*hints: str | None) -> str | None:
    """Return the first of ``hints`` that may name a session: fields of a body with another purpose."""
    return next((hint for hint in hints if hint is not None and is_session_id(hint)), None)


def serving_fields(body: object) -> dict[str, Any]:
    """Return those of the `ServingFields` that ``body`` has, for the body that it is translated into."""
    return {name: getattr(body, name, None) for name in _FIELDS}


def text_sender_of(sender: Sender) -> TextSender:
    """Return for whom texts are embedded. Raises ValidationError."""
    priority = _priority(None, sender.headers.get(PRIORITY_HEADER), sender.key)
    return TextSender(tenant=sender.key.tenant, priority=priority)


def namespace_of(tenant: Tenant, salt: str | None, limits: Limits) -> str:
    """Return the namespace in which requests of ``tenant`` with this ``cache_salt`` share prefixes.

    Raises ValidationError.
    """
    if salt is not None and not 0 < len(salt.encode()) <= limits.max_cache_salt_bytes:
        raise cache_salt_error(limits.max_cache_salt_bytes, len(salt.encode()))
    # Names contain no NUL, so no salt turns one key's namespace into another's.
    return f"{tenant.name}\0{salt or ''}"


def _whole_number(field: tuple[str, int | None], header: tuple[str, str | None]) -> tuple[str, int | None]:
    """Return the name and value of a field, or of its header if the field is None. Raises ValidationError."""
    name, text = header
    if text is None:
        return field
    if not _INTEGER.fullmatch(text):
        raise header_error(name, "a whole number", text)
    return (name, int(text)) if field[1] is None else field


def _max_draft_tokens(field: int | None, header: str | None, limits: Limits) -> int:
    name, value = _whole_number(("speculate", field), (SPECULATE_HEADER, header))
    check_range(name, value, 0, limits.max_draft_tokens)
    return limits.max_draft_tokens if value is None else value


def _keep_s(fields: object) -> float:
    """Return the longest lifetime that a body asks for, in seconds; bodies of some routes have no such field."""
    options = getattr(fields, "prompt_cache_options", None)
    asked = (getattr(options, "ttl", None), getattr(fields, "prompt_cache_retention", None))
    return max((_LIFETIMES[one] for one in asked if one is not None), default=0.0)


def tier_of(fields: object) -> str:
    """Return the tier that a body asks for; "" if it names none, or has no such field."""
    return getattr(fields, "service_tier", None) or ""


def used_tier(priority: int) -> str:
    """Return OpenAI's name of the tier that a request of this priority has."""
    return "flex" if priority < 0 else "default" if priority < _TIERS["priority"] else "priority"


def _priority(field: int | None, header: str | None, key: ApiKey, tier: str = "") -> int:
    name, value = _whole_number(("priority", field), (PRIORITY_HEADER, header))
    check_range(name, value, MIN_PRIORITY, MAX_PRIORITY)
    if value is not None and value > key.max_priority:
        raise priority_error(name, key.max_priority, value)
    # A key whose maximum is below the priority of the tier gets its maximum.
    return min(_TIERS.get(tier, 0), key.max_priority) if value is None else value


def _timeout_s(field: float | None, header: str | None) -> float:
    name, value = "timeout", field
    if header is not None:
        if not _DECIMAL.fullmatch(header):
            raise header_error(TIMEOUT_HEADER, "seconds as a decimal number", header)
        if field is None:
            name, value = TIMEOUT_HEADER, float(header)
    check_positive(name, value)
    return math.inf if value is None else value
