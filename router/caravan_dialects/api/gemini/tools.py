"""The functions of a request, and which of them may or must be called."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from caravan_dialects.api.gemini.json_schema import json_schema_of
from caravan_dialects.api.gemini.schema import FunctionCallingConfig, FunctionDeclaration, GeminiTool, ToolConfig
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.schema import ChosenFunction, FunctionDefinition, NamedToolChoice, Tool
from caravan_dialects.api.openai.rules import missing_field_error, needs_field_error

# Google runs them.
_HOSTED = {
    "googleSearch": "google_search",
    "googleSearchRetrieval": "google_search_retrieval",
    "codeExecution": "code_execution",
    "urlContext": "url_context",
    "googleMaps": "google_maps",
    "fileSearch": "file_search",
    "enterpriseWebSearch": "enterprise_web_search",
    "retrieval": "retrieval",
}
_CONFIG = "toolConfig.functionCallingConfig"
_ALLOWED = f"{_CONFIG}.allowedFunctionNames"


@dataclass(frozen=True, slots=True)
class ToolFields:
    """``chat``: the fields of the chat request. ``places``: the field of each function's schema, by its name."""

    chat: dict[str, Any]
    places: Mapping[str, str]


def skipped_tools(tools: Sequence[GeminiTool] | None) -> frozenset[str]:
    """Return the names of the ``tools`` that only Google runs."""
    return frozenset(
        name for tool in tools or () for name, attribute in _HOSTED.items() if getattr(tool, attribute) is not None
    )


def tool_fields(tools: Sequence[GeminiTool] | None, config: ToolConfig | None) -> ToolFields:
    """Translate the functions and how they are called. Raises ValidationError."""
    calling = None if config is None else config.function_calling_config
    strict = calling is not None and calling.mode == "VALIDATED"
    declared = list(_declared(tools or ()))
    made = [_tool(name, function, strict=strict) for name, function in declared]
    places = {function.name: f"{name}.{_schema_field(function)}" for name, function in declared}
    chat: dict[str, Any] = {} if calling is None else _choice(calling, made)
    return ToolFields({"tools": made or None} | chat, places)


def _declared(tools: Sequence[GeminiTool]) -> Iterator[tuple[str, FunctionDeclaration]]:
    for number, tool in enumerate(tools):
        for place, function in enumerate(tool.function_declarations or ()):
            yield f"tools[{number}].functionDeclarations[{place}]", function


def _schema_field(function: FunctionDeclaration) -> str:
    return "parameters" if function.parameters_json_schema is None else "parametersJsonSchema"


def _tool(name: str, function: FunctionDeclaration, *, strict: bool) -> Tool:
    if not function.name:
        raise missing_field_error(f"{name}.name")
    schema = function.parameters if function.parameters_json_schema is None else function.parameters_json_schema
    if schema is not None and function.parameters_json_schema is None:
        schema = json_schema_of(f"{name}.parameters", schema)
    return Tool(
        function=FunctionDefinition(
            name=function.name, description=function.description, parameters=schema, strict=strict or None
        )
    )


def _choice(calling: FunctionCallingConfig, tools: Sequence[Tool]) -> dict[str, Any]:
    allowed = calling.allowed_function_names or []
    names = {tool.function.name for tool in tools}
    for name in allowed:
        if name not in names:
            raise unsupported_field_error(_ALLOWED, "use names of functions in `tools`", name)
    if calling.mode not in {"ANY", "VALIDATED"} and allowed:
        raise needs_field_error(_ALLOWED, 'the `mode` is "ANY" or "VALIDATED"', allowed)
    match calling.mode:
        case "ANY":
            if not tools:
                raise needs_field_error(f"{_CONFIG}.mode", "`tools` has functions", "ANY")
            if len(allowed) == 1:
                return {"tool_choice": NamedToolChoice(function=ChosenFunction(name=allowed[0]))}
            return {"tool_choice": "required", "tools": _only(tools, frozenset(allowed))}
        case "VALIDATED":
            return {"tools": _only(tools, frozenset(allowed)) or None}
        case "NONE":
            return {"tool_choice": "none"}
        case _:
            return {}


def _only(tools: Sequence[Tool], allowed: Set[str]) -> list[Tool]:
    return [tool for tool in tools if not allowed or tool.function.name in allowed]
