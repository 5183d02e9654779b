"""Translates Anthropic's requests into chat requests."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from caravan_router.api.anthropic.schema import Block, MessageParam, MessagesRequest, PromptFields, ToolParam
from caravan_router.api.generation.checks import check_positive
from caravan_router.api.generation.parts import MediaParts, text_for
from caravan_router.api.generation.rules import unsupported_field_error
from caravan_router.api.generation.schema import JsonSchemaFormat, NamedSchema
from caravan_router.api.openai.chat.enforced import SchemaPlaces
from caravan_router.api.openai.chat.schema import (
    ChatRequest,
    ChosenFunction,
    FunctionCall,
    FunctionDefinition,
    Message,
    NamedToolChoice,
    Tool,
    ToolCall,
)
from caravan_router.api.openai.chat.validation import ChatSource
from caravan_router.api.openai.rules import missing_field_error
from caravan_router.chat.thought_format import thought_format_of
from caravan_router.core.engine import ModelFacts

# Claude Code begins the system prompt with this line, whose value changes with each request: it would keep the prompt
# from being found in the cache.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
_BREAK = "\n\n"


def source_of(body: MessagesRequest, model: ModelFacts) -> ChatSource:
    """Translate a body of ``/v1/messages``. Raises ValidationError."""
    check_positive("max_tokens", body.max_tokens)
    if body.container is not None:
        raise unsupported_field_error("container", "set it to null", body.container)
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
        priority=body.priority,
        timeout=body.timeout,
        cache_salt=body.cache_salt,
        speculate=body.speculate,
    )
    configured = body.output_config is not None and body.output_config.format is not None
    answer = "output_config.format" if configured else "output_format"
    places = SchemaPlaces(answer=answer, parameters="input_schema")
    return ChatSource(body=chat, clamps=True, tells_stop=True, media=media, places=places)


def chat_request_of(body: PromptFields, model: ModelFacts, media: MediaParts, **fields: Any) -> ChatRequest:
    """Translate what decides the prompt, with more ``fields`` of the chat request. Pictures are added to ``media``.

    Raises ValidationError.
    """
    if body.mcp_servers:
        raise unsupported_field_error("mcp_servers", "set it to []", body.mcp_servers)
    return ChatRequest(
        messages=_messages(body, media),
        model=body.model,
        tools=[_tool(f"tools[{number}]", tool) for number, tool in enumerate(body.tools or ())] or None,
        **_choice_fields(body),
        **_thinking_fields(body, model),
        **_format_fields(body),
        **fields,
    )


def _messages(body: PromptFields, media: MediaParts) -> list[Message]:
    messages: list[Message] = []
    if system := _system_text(body):
        messages.append(Message(role="system", content=system))
    for role, turns in _turns(body.messages):
        messages += _assistant(turns) if role == "assistant" else _user(turns, media)
    return messages


def _system_text(body: PromptFields) -> str:
    if isinstance(body.system, str):
        texts = [body.system]
    else:
        blocks = enumerate(body.system or ())
        texts = [_text_of(f"system[{number}]", block) for number, block in blocks]
    return _joined(_BILLING_LINE.sub("", text) for text in texts)


# A field's name and its block.
_Named = tuple[str, Block]


def _turns(messages: Sequence[MessageParam]) -> Iterator[tuple[str, list[_Named]]]:
    """Yield the role and the blocks of each turn.

    Messages in a row that are not the assistant's are one turn of the user: templates want alternating turns.
    """
    current: tuple[str, list[_Named]] | None = None
    for number, message in enumerate(messages):
        role = "assistant" if message.role == "assistant" else "user"
        if current is None or current[0] != role:
            if current is not None:
                yield current
            current = (role, [])
        current[1].extend(_blocks(f"messages[{number}].content", message.content))
    if current is not None:
        yield current


def _blocks(field: str, content: str | list[Block] | None) -> list[_Named]:
    if isinstance(content, str):
        return [(field, Block(type="text", text=content))]
    return [(f"{field}[{number}]", block) for number, block in enumerate(content or ())]


def _assistant(blocks: Sequence[_Named]) -> list[Message]:
    """Return the message of an assistant's turn."""
    texts, thoughts, calls = [], [], []
    for field, block in blocks:
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                if not block.name:
                    raise missing_field_error(f"{field}.name")
                function = FunctionCall(name=block.name, arguments=block.input or {})
                calls.append(ToolCall(function=function, id=block.id))
            case _:
                texts.append(_text_of(field, block))
    return [
        Message(
            role="assistant",
            # The text of a last message is continued: nothing may be added to its end.
            content="".join(texts),
            reasoning_content=_joined(thoughts) or None,
            tool_calls=calls or None,
        )
    ]


def _user(blocks: Sequence[_Named], media: MediaParts) -> list[Message]:
    """Return the results of tools, which follow the calls, and the message of a user's turn."""
    results, texts = [], []
    for name, block in blocks:
        if block.type == "tool_result":
            inner = _blocks(f"{name}.content", block.content)
            content = _joined(_shown(*named, media, of_tool=True) for named in inner)
            results.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
        else:
            texts.append(_shown(name, block, media))
    return results if results and not texts else [*results, Message(role="user", content=_joined(texts))]


def _shown(field: str, block: Block, media: MediaParts, *, of_tool: bool = False) -> str:
    """Return the text of a block, or the mark of its picture. ``of_tool``: see `text_for`."""
    if block.type != "image" or not media.sees:
        return _text_of(field, block, of_tool=of_tool)
    source = block.source
    if source is None or source.type is None:
        raise missing_field_error(f"{field}.source.type")
    if source.type != "base64":
        neutral = 'set it to "base64": nothing is fetched'
        raise unsupported_field_error(f"{field}.source.type", neutral, source.type)
    if source.data is None:
        raise missing_field_error(f"{field}.source.data")
    return media.picture(f"{field}.source.data", source.data)


def _text_of(field: str, block: Block, *, of_tool: bool = False) -> str:
    """Return the text of a block. ``of_tool``: see `text_for`."""
    if block.type != "text":
        return text_for(field, block.type, of_tool=of_tool)
    if block.text is None:
        raise missing_field_error(f"{field}.text")
    return block.text


def _joined(texts: Iterator[str] | Sequence[str]) -> str:
    return _BREAK.join(text for text in texts if text)


def _tool(field: str, tool: ToolParam) -> Tool:
    if tool.type not in {None, "custom"}:
        raise unsupported_field_error(f"{field}.type", 'set it to "custom"', tool.type)
    return Tool(
        function=FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
    )


def _choice_fields(body: PromptFields) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None or not body.tools:
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
