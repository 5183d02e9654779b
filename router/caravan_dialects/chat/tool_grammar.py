"""Builds the grammar, in llguidance's Lark, that an output must match when it must call a tool."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, assert_never

import msgspec

from caravan_dialects.chat.closed_schema import json_layout, parameters_schema, without_definitions
from caravan_dialects.chat.grammar_terms import Terms, json_term, literal_regex, quoted, terms_for
from caravan_dialects.chat.literal_grammar import LiteralGrammar
from caravan_dialects.chat.schema_references import UnsupportedSchemaError, UnsupportedToolError
from caravan_dialects.chat.tag_grammar import TagGrammar
from caravan_dialects.chat.tool_format import HOLE, NAME, Style, ToolFormat, is_tag
from caravan_dialects.chat.value_grammar import Values
from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_scheduler.core.engine import Engine

Json = dict[str, Any]


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
            body = _body(tool_format, terms, rules, name, parameters)
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


def _body(tool_format: ToolFormat, terms: Terms, rules: list[str], name: str, given: Mapping[str, Any] | None) -> str:
    """Return the term of a call, whose parameters the client gave; rules that it needs are added to ``rules``."""
    parameters = parameters_schema(given)
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
            read = tool_format.with_controls(terms.controls).tags
            assert read is not None
            tagged = TagGrammar(values, tool_format.tags, read, given or {}).arguments()
            return _joined(terms.text(name + tool_format.name_closing), tagged)
        case Style.PYTHON:
            values = Values(terms, rules, parameters, compact=False)
            return _joined(quoted(f"{name}("), LiteralGrammar(values, "", "", "=").arguments(), quoted(")"))
        case Style.BRACES:
            values, quote = Values(terms, rules, parameters, compact=True), tool_format.quote
            read_quote = tool_format.with_controls(terms.controls).quote
            members = LiteralGrammar(values, quote, read_quote, ":").arguments()
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


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any] | None]:
    """Return the parameters' schema of each function by name. ``tools`` have OpenAI's form."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
