"""Reads from a chat request the variables for the template, whether the model is to think, and for how long."""

from collections.abc import Mapping
from typing import Any

import msgspec

from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.generation.rules import TooManyBytesError
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.chat.messages import check_depth
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.rules import no_thoughts_error, template_option_error
from caravan_dialects.api.openai.sampling import one_of
from caravan_dialects.chat.thought_format import HARMONY, Thinking, ThoughtFormat, ThoughtPlan, template_options

_KWARGS = "chat_template_kwargs"
_MAX_KWARGS_BYTES = 1 << 16
# Variables that the server sets: of the conversation, of the model, and what transformers takes in the same place.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "eos_token",
        "messages",
        "pad_token",
        "raise_exception",
        "strftime_now",
        "tokenize",
        "tools",
        "unk_token",
    }
)
_SWITCHES = ("enable_thinking", "thinking")
_NO_LIMIT = -1
_MAX_BUDGET = 2**31 - 1


def template_kwargs_of(body: ChatRequest) -> dict[str, Any]:
    """Return the variables that ``body`` sets for the template. Raises ValidationError."""
    return checked_kwargs(body.chat_template_kwargs or {})


def checked_kwargs(given: Mapping[str, Any], field: str = _KWARGS) -> dict[str, Any]:
    """Return ``given`` without what is null and switches thoughts. Raises ValidationError, which names ``field``."""
    for key in given:
        if key in _RESERVED:
            raise template_option_error(f"{field}.{key}", "be left to the server", given[key])
    for key in _SWITCHES:
        if given.get(key) is not None and not isinstance(given[key], bool):
            raise template_option_error(f"{field}.{key}", "be true or false", given[key])
    if not isinstance(effort := given.get("reasoning_effort"), str | None):
        raise template_option_error(f"{field}.reasoning_effort", "be a string", effort)
    check_depth(field, dict(given))
    size = len(msgspec.json.encode(given))
    if size > _MAX_KWARGS_BYTES:
        raise TooManyBytesError(field, _MAX_KWARGS_BYTES, size)
    return {
        key: value for key, value in given.items() if value is not None or key not in (*_SWITCHES, "reasoning_effort")
    }


def thought_plan_of(
    body: ChatRequest,
    thought_format: ThoughtFormat | None,
    given: Mapping[str, Any],
    limits: Limits,
    *,
    constrained: bool,
) -> ThoughtPlan | None:
    """Return how the reply to ``body`` thinks; None if the model does not think. Raises ValidationError.

    ``given``: variables for the template. ``limits``: the budget and the effort of a request that names none.
    ``constrained``: the answer has to match something, so that it must be known where it begins.
    """
    budget = _budget(body)
    if thought_format is None:
        if body.reasoning_effort not in {None, "none"}:
            raise no_thoughts_error("reasoning_effort", body.reasoning_effort)
        if budget:
            raise no_thoughts_error("reasoning_budget_tokens", budget)
        return None
    effort = body.reasoning_effort or given.get("reasoning_effort") or _default_effort(body, given, limits)
    budget = limits.reasoning_budget if budget is None and not _names_budget(body) else budget
    can_end = bool(body.reasoning_control)
    thinking = _thinking(effort, given, budget)
    if thinking is Thinking.FREE and can_end:
        # Only a thought that the prompt opens can be ended.
        thinking = Thinking.ON
    if thinking is Thinking.FREE and constrained and thought_format is HARMONY:
        # gpt-oss thinks whatever it is asked.
        thinking = Thinking.ON
    return ThoughtPlan(
        thought_format=thought_format,
        thinking=thinking,
        options=template_options(thinking, effort, thought_format),
        max_tokens=None if thinking is Thinking.OFF else budget,
        opened=constrained or budget is not None or can_end,
        can_end=can_end and thinking is not Thinking.OFF,
    )


def _default_effort(body: ChatRequest, given: Mapping[str, Any], limits: Limits) -> str | None:
    """Return the effort of a request that names none. It does not switch off what the request asks for otherwise."""
    asks = _names_budget(body) or any(given.get(switch) is not None for switch in _SWITCHES)
    return None if limits.reasoning_effort == "none" and asks else limits.reasoning_effort


def _names_budget(body: ChatRequest) -> bool:
    given = (body.reasoning_budget_tokens, body.thinking_budget_tokens, body.thinking_token_budget)
    return any(budget is not None for budget in given)


def _thinking(effort: str | None, given: Mapping[str, Any], budget: int | None) -> Thinking:
    switches = [given.get("enable_thinking"), given.get("thinking")]
    if effort == "none" or budget == 0 or False in switches:
        return Thinking.OFF
    return Thinking.ON if effort or budget or True in switches else Thinking.FREE


def _budget(body: ChatRequest) -> int | None:
    """Return the most tokens of a thought; None for no limit."""
    name, alias, of_vllm = "reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"
    first = one_of(name, alias, body.reasoning_budget_tokens, body.thinking_budget_tokens)
    budget = one_of(name, of_vllm, first, body.thinking_token_budget)
    check_range(name, budget, _NO_LIMIT, _MAX_BUDGET)
    return None if budget == _NO_LIMIT else budget
