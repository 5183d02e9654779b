"""The functions of a request, which of them may or must be called, and the JSON schemas that Google's mean."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from caravan_dialects.api.gemini.schema import FunctionCallingConfig, FunctionDeclaration, GeminiTool, ToolConfig
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.messages import check_depth
from caravan_dialects.api.openai.chat.schema import ChosenFunction, FunctionDefinition, NamedToolChoice, Tool
from caravan_dialects.api.openai.rules import missing_field_error, needs_field_error

Json = dict[str, Any]

# Protobuf's JSON has these as texts, since they are 64 bits long.
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_BY_NAME = frozenset({"properties", "$defs"})
_LISTED = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
# Written with underscores, or without the "$" that Protobuf's names cannot have.
_OTHER_NAMES = {
    "any_of": "anyOf",
    "one_of": "oneOf",
    "prefix_items": "prefixItems",
    "additional_properties": "additionalProperties",
    "property_ordering": "propertyOrdering",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "defs": "$defs",
    "ref": "$ref",
}
_ORDER = "propertyOrdering"
_CONFIG = "toolConfig.functionCallingConfig"
_ALLOWED = f"{_CONFIG}.allowedFunctionNames"


def json_schema_of(field: str, schema: Json) -> Json:
    """Return the JSON schema that ``schema`` means, which may also be one itself. Raises ValidationError.

    Types are written in lower case, ``nullable`` becomes one more type, and properties come in the order of
    ``propertyOrdering``, in which the model writes them.
    """
    check_depth(field, schema)
    return _translated(schema)


def _translated(schema: Json) -> Json:
    given = {_OTHER_NAMES.get(key, key): value for key, value in schema.items()}
    made: Json = {}
    for key, value in given.items():
        if key == "type":
            if (kind := _type(value)) is not None:
                made[key] = kind
        elif key in _COUNTS:
            made[key] = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
        elif key in _BY_NAME and isinstance(value, dict):
            made[key] = {name: _inner(one) for name, one in _ordered(value, given.get(_ORDER)).items()}
        elif key in _LISTED and isinstance(value, list):
            made[key] = [_inner(one) for one in value]
        elif key in {"items", "additionalProperties"}:
            made[key] = _inner(value)
        elif key not in {_ORDER, "nullable"}:
            made[key] = value
    return _nullable(made) if given.get("nullable") is True else made


def _inner(value: Any) -> Any:
    return _translated(value) if isinstance(value, dict) else value


def _type(value: Any) -> Any:
    if isinstance(value, list):
        return [_type(one) for one in value]
    if not isinstance(value, str):
        return value
    return None if value == "TYPE_UNSPECIFIED" else value.lower()


def _ordered(properties: Json, order: Any) -> Json:
    if not isinstance(order, list):
        return properties
    first = {name: properties[name] for name in order if isinstance(name, str) and name in properties}
    return first | properties


def _nullable(schema: Json) -> Json:
    """Return the schema of ``schema``'s values and null."""
    if isinstance(kind := schema.get("type"), str) and "enum" not in schema and not _LISTED & schema.keys():
        return schema | {"type": [kind, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


@dataclass(frozen=True, slots=True)
class ToolFields:
    """``chat``: the fields of the chat request. ``places``: the field of each function's schema, by its name."""

    chat: dict[str, Any]
    places: Mapping[str, str]


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
