"""Translates Anthropic's requests into chat requests."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from caravan_dialects.api.anthropic.rules import ThreadError
from caravan_dialects.api.anthropic.schema import MessagesRequest, PromptFields, ToolParam
from caravan_dialects.api.anthropic.turns import TOOL_CHANGES, blocks_of, chat_messages_of
from caravan_dialects.api.generation.checks import check_positive
from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.generation.schema import CacheOptions, JsonSchemaFormat, NamedSchema
from caravan_dialects.api.generation.serving import serving_fields
from caravan_dialects.api.openai.chat.enforced import SchemaPlaces
from caravan_dialects.api.openai.chat.schema import (
    ChatRequest,
    ChosenFunction,
    FunctionDefinition,
    NamedToolChoice,
    Tool,
)
from caravan_dialects.api.openai.chat.validation import ChatSource
from caravan_dialects.api.openai.rules import missing_field_error, needs_field_error
from caravan_dialects.chat.thought_format import thought_format_of
from caravan_scheduler.core.engine import ModelFacts

# Tools that Anthropic runs begin so; a date follows. A model has no use for what nobody runs.
_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
_IN_USER_ID = re.compile(r"_session_([A-Za-z0-9-]+)\Z")


def source_of(body: MessagesRequest, model: ModelFacts) -> ChatSource:
    """Translate a body of ``/v1/messages``. Raises ValidationError."""
    check_positive("max_tokens", body.max_tokens)
    media = MediaParts(model.media)
    chat = chat_request_of(
        body,
        model,
        media,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        **serving_fields(body) | {"prompt_cache_options": CacheOptions(ttl=_ttl(body))},
        prompt_cache_key=_session_in(body.metadata),
    )
    configured = body.output_config is not None and body.output_config.format is not None
    answer = "output_config.format" if configured else "output_format"
    places = SchemaPlaces(answer=answer, parameters="input_schema")
    return ChatSource(body=chat, clamps=True, tells_stop=True, media=media, places=places)


def _ttl(body: MessagesRequest) -> Literal["5m", "1h"] | None:
    """Return the longest lifetime that ``body`` asks for."""
    system = () if isinstance(body.system, str) else body.system or ()
    turns = [block for _, block in blocks_of(body.messages)]
    inner = [one for block in turns if isinstance(block.content, list) for one in block.content]
    marked = (body, *(body.tools or ()), *system, *turns, *inner)
    asked = {one.cache_control.ttl or "5m" for one in marked if one.cache_control is not None}
    return "1h" if "1h" in asked else "5m" if asked else None


class _UserId(msgspec.Struct, frozen=True):
    session_id: str | None = None


def _session_in(metadata: Any) -> str | None:
    """Return the session that Claude Code names in ``user_id``: in JSON, or in older versions at the end of a text."""
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user_id, str):
        return None
    if not user_id.startswith("{"):
        found = _IN_USER_ID.search(user_id)
        return None if found is None else found[1]
    try:
        return msgspec.json.decode(user_id, type=_UserId).session_id
    except msgspec.DecodeError:
        return None


def chat_request_of(body: PromptFields, model: ModelFacts, media: MediaParts, **fields: Any) -> ChatRequest:
    """Translate what decides the prompt, with more ``fields`` of the chat request. Pictures are added to ``media``.

    Raises ValidationError.
    """
    if body.thread is not None:
        raise ThreadError(body.thread)
    tools = _tools(body)
    return ChatRequest(
        messages=chat_messages_of(body, media),
        model=body.model,
        tools=tools or None,
        **_choice_fields(body, tools),
        **_thinking_fields(body, model),
        **_format_fields(body),
        **fields,
    )


def skipped_tools(body: PromptFields) -> frozenset[str]:
    """Return the types of the tools of ``body`` that Anthropic would run, and that nobody runs here."""
    return frozenset(tool.type for tool in body.tools or () if tool.type is not None and _is_hosted(tool))


def _is_hosted(tool: ToolParam) -> bool:
    return (tool.type or "").startswith(_HOSTED)


def _tools(body: PromptFields) -> list[Tool]:
    """Return the tools that the model is offered after all changes that turns have. Raises ValidationError."""
    given = [_tool(f"tools[{number}]", tool) for number, tool in enumerate(body.tools or ()) if not _is_hosted(tool)]
    by_name, offered = {tool.function.name: tool for tool in given}, given
    for field, block in blocks_of(body.messages):
        change = block.tool
        if change is None or block.type not in TOOL_CHANGES:
            continue
        definition = change.definition
        name = change.name if definition is None else definition.name
        offered = [tool for tool in offered if tool.function.name != name]
        if block.type != "tool_addition":
            continue
        if definition is not None and not _is_hosted(definition):
            offered.append(_tool(f"{field}.tool.definition", definition))
        elif definition is None and name in by_name:
            offered.append(by_name[name])
    return offered


def _tool(field: str, tool: ToolParam) -> Tool:
    if tool.type not in {None, "custom"}:
        raise unsupported_field_error(f"{field}.type", 'set it to "custom"', tool.type)
    if not tool.name:
        raise missing_field_error(f"{field}.name")
    return Tool(
        function=FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
    )


def _choice_fields(body: PromptFields, tools: Sequence[Tool]) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    if choice.type == "tool" and any(tool.name == choice.name and _is_hosted(tool) for tool in body.tools or ()):
        # A tool that is left out cannot be demanded: Claude Code's search demands it.
        return {}
    if not tools:
        if choice.type in {"any", "tool"}:
            raise needs_field_error("tool_choice", "`tools` has functions", choice.type)
        return {}
    fields: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    match choice.type:
        case "any":
            fields["tool_choice"] = "required"
        case "tool":
            if not choice.name:
                raise missing_field_error("tool_choice.name")
            fields["tool_choice"] = NamedToolChoice(function=ChosenFunction(name=choice.name))
        case "auto" | "none":
            fields["tool_choice"] = choice.type
    return fields


def _thinking_fields(body: PromptFields, model: ModelFacts) -> dict[str, Any]:
    """Return the fields that switch thoughts on or off. A model that does not think ignores what it is asked."""
    thinking = body.thinking
    if thinking is not None:
        check_positive("thinking.budget_tokens", thinking.budget_tokens)
    if thought_format_of((model.tool_template if body.tools else "") or model.chat_template) is None:
        return {}
    fields: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if thinking is not None:
        switched_on = thinking.type != "disabled"
        fields["chat_template_kwargs"] = {"enable_thinking": switched_on}
        if switched_on and thinking.budget_tokens is not None:
            fields["reasoning_budget_tokens"] = thinking.budget_tokens
    return fields


def _format_fields(body: PromptFields) -> dict[str, Any]:
    asked = body.output_format if body.output_config is None else body.output_config.format or body.output_format
    if asked is None:
        return {}
    return {"response_format": JsonSchemaFormat(json_schema=NamedSchema(schema=asked.schema))}
