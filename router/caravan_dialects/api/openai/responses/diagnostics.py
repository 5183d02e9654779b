"""OpenAI's prompt cache diagnostics: which change of a request kept its prompt from beginning as that of a response."""

from collections.abc import Sequence

import msgspec

from caravan_dialects.api.generation.comparison import Fingerprint, RememberedRequests, divergence, fingerprint_of
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.openai.responses.schema import PromptCacheDiagnostics, ResponseRequest
from caravan_dialects.api.openai.responses.validation import ValidTurn
from caravan_dialects.conversations.nodes import Json

_REASONS = {
    "model": "model_changed",
    "tools": "tools_changed",
    "text": "text_format_changed",
    "effort": "reasoning_effort_changed",
    "truncated": "context_compacted",
    "instructions": "input_changed",
    "messages": "input_changed",
}
# Of an item, these change from request to request, and its prompt does not depend on them.
_UNREAD = frozenset({"id", "status"})


def diagnosed(
    remembered: RememberedRequests, owner: str, body: ResponseRequest, now: Fingerprint
) -> PromptCacheDiagnostics | msgspec.UnsetType:
    """Return how the request compares with the one that ``body`` names, if it names one."""
    asked = None if body.prompt_cache_options is None else body.prompt_cache_options.comparison_response_id
    if asked is None:
        return msgspec.UNSET
    before = remembered.find(owner, asked)
    if before is None:
        return PromptCacheDiagnostics(type="comparison_response_not_found")
    found = divergence(before, now)
    if found is None:
        return PromptCacheDiagnostics(type="cache_hit")
    reason = _REASONS.get(found.part)
    if reason is None:
        return PromptCacheDiagnostics(type="unavailable", first_difference=found.at)
    return PromptCacheDiagnostics(
        type="cache_miss",
        reason=reason,
        cache_missed_tokens=found.later,
        comparison_reusable_tokens=found.common,
        first_difference=found.at,
    )


def fingerprint(context: Context, body: ResponseRequest, items: Sequence[Json], turn: ValidTurn) -> Fingerprint:
    """Return hashes of a request, which has ``items`` with those that it continues."""
    parts = {
        "model": [context.model.name, context.adapter_key, context.model.fingerprint],
        "tools": body.tools or [],
        "text": None if body.text is None else body.text.format,
        "effort": None if body.reasoning is None else body.reasoning.effort,
        "truncated": 0 if turn.truncated is None else turn.truncated.turns,
        "instructions": body.instructions,
        "salt": body.cache_salt,
        "choice": body.tool_choice,
    }
    read = ({name: field for name, field in item.items() if name not in _UNREAD} for item in items)
    return fingerprint_of(parts, read, turn.chat.request.prompt)
