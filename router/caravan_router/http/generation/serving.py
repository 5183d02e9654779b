"""Options of every generating request: tenant, priority, deadline and cache namespace."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from caravan_router.auth.key import MAX_PRIORITY, MIN_PRIORITY, ApiKey
from caravan_router.core.constraint import Constraint
from caravan_router.core.generation import GenerationSpec
from caravan_router.core.sampling import SamplingParams, StoppingParams
from caravan_router.core.tenant import Tenant
from caravan_router.core.thought import Thought
from caravan_router.http.generation.checks import check_positive, check_range
from caravan_router.http.generation.rules import CacheSaltError, HeaderError, PriorityError
from caravan_router.http.generation.schema import ServingFields
from caravan_router.http.limits import Limits

PRIORITY_HEADER = "X-Priority"
TIMEOUT_HEADER = "X-Request-Timeout"
SPECULATE_HEADER = "X-Speculate"

# Python's own readers also accept "1_0", "nan" and digits of other scripts.
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Parts of a GenerationSpec that few requests have."""

    constraint: Constraint | None = None
    adapter: str = ""
    prompt_logprobs: bool = False
    prediction: tuple[int, ...] = ()
    thought: Thought | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """``timeout_s``: from submission to the last token. Prompts share computed prefixes within a ``namespace``.

    ``traceparent`` and ``max_draft_tokens``: see `GenerationSpec`.
    """

    priority: int
    tenant: Tenant
    namespace: str
    timeout_s: float
    traceparent: str
    max_draft_tokens: int

    def spec(
        self, prompt: tuple[int, ...], sampling: SamplingParams, stopping: StoppingParams, extras: Extras
    ) -> GenerationSpec:
        """Return a generation that is served this way."""
        return GenerationSpec(
            prompt=prompt,
            sampling=sampling,
            stopping=stopping,
            priority=self.priority,
            tenant=self.tenant,
            namespace=self.namespace,
            constraint=extras.constraint,
            adapter=extras.adapter,
            prompt_logprobs=extras.prompt_logprobs,
            timeout_s=self.timeout_s,
            traceparent=self.traceparent,
            max_draft_tokens=self.max_draft_tokens,
            prediction=extras.prediction,
            thought=extras.thought,
        )


def serving_of(
    fields: ServingFields, headers: Mapping[str, str], key: ApiKey, limits: Limits, traceparent: str
) -> Serving:
    """Read body fields, and headers from clients that cannot send the fields; a field wins over its header.

    Raises ValidationError.
    """
    salt = fields.cache_salt
    if salt is not None and not 0 < len(salt.encode()) <= limits.max_cache_salt_bytes:
        raise CacheSaltError(limits.max_cache_salt_bytes, len(salt.encode()))
    return Serving(
        priority=_priority(fields.priority, headers.get(PRIORITY_HEADER), key),
        tenant=key.tenant,
        # Names contain no NUL, so no salt turns one key's namespace into another's.
        namespace=f"{key.tenant.name}\0{salt or ''}",
        timeout_s=_timeout_s(fields.timeout, headers.get(TIMEOUT_HEADER)),
        traceparent=traceparent,
        max_draft_tokens=_max_draft_tokens(fields.speculate, headers.get(SPECULATE_HEADER), limits),
    )


def _whole_number(field: tuple[str, int | None], header: tuple[str, str | None]) -> tuple[str, int | None]:
    """Return the name and value of a field, or of its header if the field is None. Raises HeaderError."""
    name, text = header
    if text is None:
        return field
    if not _INTEGER.fullmatch(text):
        raise HeaderError(name, "a whole number", text)
    return (name, int(text)) if field[1] is None else field


def _max_draft_tokens(field: int | None, header: str | None, limits: Limits) -> int:
    name, value = _whole_number(("speculate", field), (SPECULATE_HEADER, header))
    check_range(name, value, 0, limits.max_draft_tokens)
    return limits.max_draft_tokens if value is None else value


def _priority(field: int | None, header: str | None, key: ApiKey) -> int:
    name, value = _whole_number(("priority", field), (PRIORITY_HEADER, header))
    check_range(name, value, MIN_PRIORITY, MAX_PRIORITY)
    if value is not None and value > key.max_priority:
        raise PriorityError(name, key.max_priority, value)
    # A key whose maximum is below the default priority gets its maximum.
    return min(0, key.max_priority) if value is None else value


def _timeout_s(field: float | None, header: str | None) -> float:
    name, value = "timeout", field
    if header is not None:
        if not _DECIMAL.fullmatch(header):
            raise HeaderError(TIMEOUT_HEADER, "seconds as a decimal number", header)
        if field is None:
            name, value = TIMEOUT_HEADER, float(header)
    check_positive(name, value)
    return math.inf if value is None else value
