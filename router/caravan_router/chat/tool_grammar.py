"""Builds the grammar, in llguidance's Lark, that an output must match when it must call a tool."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, assert_never

import msgspec

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_router.chat.argument_types import Schema
from caravan_router.chat.closed_schema import json_layout, parameters_schema, without_definitions
from caravan_router.chat.grammar_terms import Terms, json_term, literal_regex, quoted, terms_for
from caravan_router.chat.nested_arguments import ITEM
from caravan_router.chat.schema_problem import UnsupportedSchemaError, UnsupportedToolError
from caravan_router.chat.tool_format import HOLE, KEY, NAME, Style, Tags, ToolFormat, is_tag
from caravan_router.chat.value_grammar import Values, properties_of, required_of
from caravan_router.core.engine import Engine

Json = dict[str, Any]

_MAX_DEPTH = 32
# What the rules of tags within tags do not know.
_JSON_ONLY = frozenset(
    {"const", "enum", "anyOf", "oneOf", "allOf", "minItems", "maxItems", "prefixItems", "uniqueItems", "contains"}
)


async def tool_constraint(
    engine: Engine,
    tool_format: ToolFormat,
    functions: Mapping[str, Mapping[str, Any] | None],
    *,
    several: bool,
    answer: str | None = None,
    beside: Collection[str] | None = None,
) -> Constraint:
    """Return the constraint for one call to one of ``functions``, which maps names to the schemas of their parameters.

    With ``several`` it allows more calls if the format can express them. ``answer``: a JSON schema; JSON that matches
    it may be written in place of calls. ``beside``: any text may precede calls, or stand in place of them, also with
    these tags in it; the format must be one that `opens_calls`. Raises NoShardError, UnsupportedToolError.
    """
    terms = await terms_for(engine, (*tool_format.delimiters, *(beside or ())))
    rules: list[str] = []
    for number, (name, parameters) in enumerate(functions.items()):
        try:
            body = _body(tool_format, terms, rules, name, parameters_schema(parameters))
        except UnsupportedSchemaError as error:
            raise UnsupportedToolError(name, str(error)) from error
        before = terms.text(tool_format.opening.replace(NAME, name)) if NAME in tool_format.opening else ""
        rules.append(f"call_{number}: {_joined(before, body, terms.text(tool_format.closing))}")
    rules.append(f"opened: {' | '.join(f'call_{number}' for number in range(len(functions)))}")
    common = "" if NAME in tool_format.opening else terms.text(tool_format.opening)
    rules.append(f"call: {_joined(common, 'opened')}")
    more = f"({_joined(terms.text(tool_format.between), 'call')})*" if several and not tool_format.single else ""
    behind = (more, terms.text(tool_format.section_closing))
    section = (terms.text(tool_format.section_opening), "opened" if tool_format.prompted else "call", *behind)
    start = [f"start: {_joined(*section)}"]
    if beside is not None:
        start = _beside_text(terms, tool_format, behind, beside)
    if answer is not None:
        start = ["start: calls | answer", f"calls: {_joined(*section)}", f"answer: {json_term(_answer_schema(answer))}"]
    return Constraint(ConstraintKind.LARK, "\n".join([*start, *rules]))


def opens_calls(tool_format: ToolFormat) -> bool:
    """Whether a tag opens calls, so that a grammar can tell where they begin within a text."""
    first = next(iter(tool_format.opening_units), "")
    return is_tag(first) and HOLE not in first and not tool_format.also_opened


def _beside_text(terms: Terms, tool_format: ToolFormat, behind: Sequence[str], allowed: Collection[str]) -> list[str]:
    """Return rules for a text, which may have the tags ``allowed``, and for calls: ``behind`` follows the first one."""
    first, *others = tool_format.triggers
    opening = (tool_format.section_opening or tool_format.opening).lstrip()
    calls = ("call" if tool_format.section_opening else "opened", *behind)
    section = _joined(terms.text(opening.removeprefix(first)), *calls)
    tags = [terms.text(tag) for tag in sorted(allowed) if terms.is_control(tag)]
    start = f"start: (TEXT? ({' | '.join(tags)}))* " if tags else "start: "
    # A regular expression matches no control token.
    plain = [literal_regex(other) for other in others if not terms.is_control(other)]
    text = f"/(?s:.+)/ & ~/(?s:.*)({'|'.join(plain)})(?s:.*)/" if plain else "/(?s:.+)/"
    if terms.is_control(first):
        return [f"{start}TEXT? (section)?", f"section: {terms.text(first)} {section}", f"TEXT: {text}"]
    return [
        f"{start}(section | TEXT)?",
        f"section: head {section}",
        f"head[suffix={quoted(first)}]: {text.replace('.+', '.*', 1)}",
        f"TEXT: {text}",
    ]


def _answer_schema(source: str) -> Json:
    return {**msgspec.json.decode(source, type=Json), "x-guidance": json_layout(compact=False)}


def _joined(*terms: str) -> str:
    return " ".join(term for term in terms if term)


def _body(tool_format: ToolFormat, terms: Terms, rules: list[str], name: str, parameters: Json) -> str:
    """Return the term of a call; rules that it needs are added to ``rules``."""
    match tool_format.style:
        case Style.OBJECT:
            return json_term(_object_schema(tool_format, name, parameters))
        case Style.KEYED:
            return json_term(_closed_object(tool_format, {name: parameters}))
        case Style.JSON:
            arguments = {**parameters, "x-guidance": json_layout(compact=tool_format.compact)}
            return _joined(terms.text(name + tool_format.name_closing), json_term(arguments))
        case Style.TAGS:
            assert tool_format.tags is not None
            values = Values(terms, rules, parameters, compact=tool_format.compact)
            tagged = _tagged(values, tool_format.tags, parameters)
            return _joined(terms.text(name + tool_format.name_closing), tagged)
        case Style.PYTHON:
            values = Values(terms, rules, parameters, compact=False)
            return _joined(quoted(f"{name}("), values.members(parameters, "", lambda key: f"{key}="), quoted(")"))
        case Style.BRACES:
            values = Values(terms, rules, parameters, compact=True)
            members = values.members(parameters, tool_format.quote, lambda key: f"{key}:")
            return _joined(quoted(f"{name}{{"), members, quoted("}"))
        case _:
            assert_never(tool_format.style)


def _object_schema(tool_format: ToolFormat, name: str, parameters: Json) -> Json:
    ids = {key: {"type": "string", "pattern": f"^{pattern}$"} for key, pattern in tool_format.ids}
    call = {tool_format.name_key: {"const": name}, tool_format.arguments_key: parameters}
    return _closed_object(tool_format, {**ids, **call} if tool_format.ids_first else {**call, **ids})


def _closed_object(tool_format: ToolFormat, properties: Json) -> Json:
    definitions: Json = {}
    for key, schema in properties.items():
        properties[key], found = without_definitions(schema)
        definitions |= found
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        "x-guidance": json_layout(compact=tool_format.compact),
        **definitions,
    }


def _tagged(values: Values, tags: Tags, parameters: Schema, depth: int = _MAX_DEPTH) -> str:
    arguments = []
    for key, schema in properties_of(parameters).items():
        argument = _argument(values, tags, key, schema, depth)
        arguments.append(argument if key in required_of(parameters) else f"{argument}?")
    return " ".join(arguments)


def _argument(values: Values, tags: Tags, key: str, schema: Schema, depth: int) -> str:
    """Return a rule for an argument with its tags."""
    kinds = values.types_of(schema)
    closing = tags.value_closing.replace(KEY, key)
    as_text = "string" in kinds
    named = dict(tags.kinds).get("string" if as_text else min(kinds), "")
    before = values.terms.text(tags.key_opening + key + tags.key_closing + named + tags.kind_closing)
    if as_text:
        return values.rule(_joined(before, values.text_until(schema, closing)))
    value = _nested(values, tags, schema, depth) if KEY in tags.value_closing else None
    return values.rule(_joined(before, value or values.bare(schema), values.terms.text(closing)))


def _nested(values: Values, tags: Tags, schema: Schema, depth: int) -> str | None:
    """Return a rule for a value as tags within tags, see `nested_arguments`; None if it must be JSON."""
    schema = values.resolved(schema)
    if not depth or _JSON_ONLY & schema.keys():
        return None
    kinds = values.types_of(schema)
    items = schema.get("items")
    if kinds == {"array"} and isinstance(items, Mapping):
        return values.rule(f'"[]" | {_argument(values, tags, ITEM, items, depth - 1)}+')
    # Without a tag it would be a text.
    if kinds == {"object"} and required_of(schema) & properties_of(schema).keys():
        return values.rule(_tagged(values, tags, schema, depth - 1))
    return None


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any] | None]:
    """Return the parameters' schema of each function by name. ``tools`` have OpenAI's form."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
