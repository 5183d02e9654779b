"""Fields of other servers that mean what fields of OpenAI's or vLLM's mean, and the number that means no limit."""

import secrets
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.openai.chat.schema import ChatRequest, Effort
from caravan_dialects.api.openai.completions.schema import CompletionRequest
from caravan_dialects.api.openai.rules import alias_error, hidden_reasoning_error
from caravan_dialects.api.openai.sampling import one_of
from caravan_proto.messages.sampling import RANGES

# Of new tokens: all that fit.
UNLIMITED = -1

_Body = TypeVar("_Body", ChatRequest, CompletionRequest)


def with_one_name(body: _Body) -> _Body:
    """Return ``body`` with llama-server's fields under the names that the other fields have. Raises ValidationError."""
    changes: dict[str, Any] = {}
    if body.n_predict is not None:
        changes["max_tokens"] = one_of("max_tokens", "n_predict", body.max_tokens, body.n_predict)
    if (penalty := body.repeat_penalty) is not None:
        allowed = RANGES["repetition_penalty"]
        check_range("repeat_penalty", penalty, allowed.low, allowed.high)
        name = "repetition_penalty"
        changes[name] = one_of(name, "repeat_penalty", body.repetition_penalty, penalty)
    if body.cache_prompt is False:
        changes["cache_salt"] = secrets.token_hex(8)
    return msgspec.structs.replace(body, **changes) if changes else body


def with_limit(body: ChatRequest) -> ChatRequest:
    """Return ``body`` with one number of new tokens at most, and none if it is -1. Raises ValidationError."""
    named = _with_thinking(with_one_name(body))
    if UNLIMITED not in {named.max_tokens, named.max_completion_tokens}:
        return named
    # Both names of it say the same, if both are set.
    one_of("max_tokens", "max_completion_tokens", named.max_tokens, named.max_completion_tokens)
    return msgspec.structs.replace(named, max_tokens=None, max_completion_tokens=None)


def _with_thinking(body: ChatRequest) -> ChatRequest:
    """Return ``body`` with what two objects of other servers say of thoughts in the fields for that."""
    if body.reasoning is not None and body.reasoning.exclude:
        if body.include_reasoning:
            raise alias_error("include_reasoning", "reasoning.exclude", True, True)
        body = msgspec.structs.replace(body, include_reasoning=False)
    if body.include_reasoning is False and body.reasoning_format == "none":
        raise hidden_reasoning_error(body.reasoning_format)
    effort, budget = body.reasoning_effort, body.reasoning_budget_tokens
    for field, asked_effort, limit, asked_budget in _asked_thinking(body):
        effort = one_of("reasoning_effort", field, effort, asked_effort)
        budget = one_of("reasoning_budget_tokens", limit, budget, asked_budget)
    if (effort, budget) == (body.reasoning_effort, body.reasoning_budget_tokens):
        return body
    return msgspec.structs.replace(body, reasoning_effort=effort, reasoning_budget_tokens=budget)


def _asked_thinking(body: ChatRequest) -> Iterator[tuple[str, Effort | None, str, int | None]]:
    """Yield the effort and the budget that each object asks for, each after the path of its field."""
    if (asked := body.reasoning) is not None:
        effort, field = asked.effort, "reasoning.effort"
        if asked.enabled is not None and (effort is None or not asked.enabled):
            effort, field = (
                _switched(asked.enabled, said=asked.max_tokens or body.reasoning_effort),
                "reasoning.enabled",
            )
        yield field, effort, "reasoning.max_tokens", asked.max_tokens
    if body.thinking is not None:
        on, budget = body.thinking.type != "disabled", body.thinking.budget_tokens
        effort = _switched(on, said=budget or body.reasoning_effort)
        yield "thinking.type", effort, "thinking.budget_tokens", budget


def _switched(on: bool, *, said: int | str | None) -> Effort | None:
    """Return the effort that switches thoughts on or off; None if another field has ``said`` how much is thought."""
    if not on:
        return "none"
    return None if said else "medium"
