"""Translates Gemini's requests into chat requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from caravan_dialects.api.gemini.contents import chat_messages_of
from caravan_dialects.api.gemini.schema import (
    CountTokensBody,
    GenerateContentRequest,
    GenerationConfig,
    ThinkingConfig,
)
from caravan_dialects.api.gemini.tools import ToolFields, json_schema_of, tool_fields
from caravan_dialects.api.generation.checks import check_positive, check_range
from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.generation.rules import invalid_grammar_error
from caravan_dialects.api.generation.schema import JsonSchemaFormat, NamedSchema
from caravan_dialects.api.generation.serving import serving_fields
from caravan_dialects.api.openai.chat.enforced import SchemaPlaces
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.chat.validation import ChatSource
from caravan_dialects.api.openai.rules import (
    missing_field_error,
    needs_field_error,
    two_constraints_error,
)
from caravan_dialects.chat.thought_format import thought_format_of
from caravan_proto.messages.sampling import RANGES
from caravan_scheduler.core.engine import ModelFacts

CONFIG = "generationConfig"
_NO_CONFIG = GenerationConfig()
_SAMPLED = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "seed": "seed",
}
# JSON of any kind: Gemini also answers with lists.
_ANY_JSON = {"type": ["object", "array"]}


@dataclass(frozen=True, slots=True)
class _Asked:
    """The constraint of the answer as fields of the chat request, and the field in which the client wrote it."""

    chat: dict[str, Any]
    field: str = "responseSchema"


def source_of(body: GenerateContentRequest, model: ModelFacts) -> ChatSource:
    """Translate a body of ``:generateContent``. Raises ValidationError."""
    config = body.generation_config or _NO_CONFIG
    _check_config(config)
    media = MediaParts(model.media)
    tools, asked = tool_fields(body.tools, body.tool_config), _asked(config)
    chat = _chat_request(
        body,
        model,
        media,
        tools,
        **asked.chat,
        **{name: getattr(config, name) for name in _SAMPLED},
        max_tokens=config.max_output_tokens,
        stop=config.stop_sequences,
        logprobs=config.response_logprobs,
        top_logprobs=config.logprobs,
        **serving_fields(body),
    )
    places = SchemaPlaces(answer=f"{CONFIG}.{asked.field}", parameters="", tools=tools.places)
    return ChatSource(
        body=chat, names=("contents", f"{CONFIG}.maxOutputTokens"), clamps=True, media=media, places=places
    )


def counted_request(body: CountTokensBody) -> GenerateContentRequest:
    """Return the request whose prompt is counted. Raises ValidationError."""
    if (whole := body.generate_content_request) is not None:
        if body.contents is not None:
            raise needs_field_error("contents", "there is no `generateContentRequest`", "both")
        return whole
    if body.contents is None:
        raise missing_field_error("contents")
    return GenerateContentRequest(
        contents=body.contents,
        system_instruction=body.system_instruction,
        tools=body.tools,
        generation_config=body.generation_config,
    )


def prompt_request_of(body: GenerateContentRequest, model: ModelFacts, media: MediaParts) -> ChatRequest:
    """Translate what decides the prompt. Pictures and sounds are added to ``media``. Raises ValidationError."""
    return _chat_request(body, model, media, tool_fields(body.tools, body.tool_config))


def _chat_request(
    body: GenerateContentRequest, model: ModelFacts, media: MediaParts, tools: ToolFields, **fields: Any
) -> ChatRequest:
    thinking = (body.generation_config or _NO_CONFIG).thinking_config
    return ChatRequest(
        messages=chat_messages_of(body.contents, body.system_instruction, media),
        **tools.chat,
        **_thinking_fields(thinking, model, tools=bool(tools.chat["tools"])),
        **fields,
    )


def _check_config(config: GenerationConfig) -> None:
    for name, shown in _SAMPLED.items():
        if (allowed := RANGES.get(name)) is not None:
            check_range(f"{CONFIG}.{shown}", getattr(config, name), allowed.lowest_sent, allowed.high)
    check_positive(f"{CONFIG}.maxOutputTokens", config.max_output_tokens)
    if config.logprobs and not config.response_logprobs:
        raise needs_field_error(f"{CONFIG}.logprobs", "`responseLogprobs` is true", config.logprobs)


def _thinking_fields(thinking: ThinkingConfig | None, model: ModelFacts, *, tools: bool) -> dict[str, Any]:
    """Return the fields that switch thoughts on or off. A model that does not think ignores what it is asked."""
    if thinking is None:
        return {}
    budget, level = thinking.thinking_budget, thinking.thinking_level
    if budget is not None and budget < 0:
        check_range(f"{CONFIG}.thinkingConfig.thinkingBudget", budget, -1, -1)
    if thought_format_of((model.tool_template if tools else "") or model.chat_template) is None:
        return {}
    fields: dict[str, Any] = {}
    if level is not None and level != "THINKING_LEVEL_UNSPECIFIED":
        fields["reasoning_effort"] = level.lower()
    if budget is not None and budget >= 0:
        fields["reasoning_budget_tokens"] = budget
    return fields


def _asked(config: GenerationConfig) -> _Asked:
    """Return what the answer must match. A schema alone asks for JSON, too. Raises ValidationError."""
    plain, own = config.response_json_schema, config.response_schema
    if plain is not None and own is not None:
        raise two_constraints_error(f"{CONFIG}.responseSchema", f"{CONFIG}.responseJsonSchema")
    field = "responseSchema" if plain is None else "responseJsonSchema"
    schema = plain if own is None else json_schema_of(f"{CONFIG}.{field}", own)
    if config.response_mime_type == "text/x.enum":
        return _Asked({"guided_choice": _choices(f"{CONFIG}.{field}", schema)}, field)
    if schema is not None:
        return _Asked(_json_format(schema), field)
    if config.response_mime_type == "application/json":
        return _Asked(_json_format(_ANY_JSON), "responseMimeType")
    return _Asked({})


def _choices(field: str, schema: dict[str, Any] | None) -> Sequence[str]:
    """Return the texts of which the answer is one. Raises ValidationError."""
    given = (schema or {}).get("enum")
    if isinstance(given, list) and given and all(isinstance(one, str) and one for one in given):
        return given
    raise invalid_grammar_error(field, "`text/x.enum` needs its `enum`, a list of texts that are not empty")


def _json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": JsonSchemaFormat(json_schema=NamedSchema(schema=schema))}
