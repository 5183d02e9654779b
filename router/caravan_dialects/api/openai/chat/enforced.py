"""Makes the one constraint of a chat out of its tools and of the format of its answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caravan_dialects.api.errors import ToolError
from caravan_dialects.api.generation.constraints import FieldConstraint, compiled
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.openai.chat.messages import template_tools
from caravan_dialects.api.openai.chat.plan import ChatPlan
from caravan_dialects.api.openai.chat.schema import Tool
from caravan_dialects.chat.schema_references import UnsupportedToolError
from caravan_dialects.chat.tool_format import ToolFormat
from caravan_dialects.chat.tool_grammar import functions_of, opens_calls, tool_constraint
from caravan_proto.messages.constraint import Constraint

Functions = Mapping[str, Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPlaces:
    """Where the clients of a dialect write schemas, for errors.

    ``answer``: the field of the answer's format. ``parameters``: the field of a tool that has the schema of its
    parameters, "" if that is what ``tools`` has. ``tools``: the field of each function, by its name; None if all tools
    of the body are functions.
    """

    answer: str = "response_format"
    parameters: str = "function.parameters"
    tools: Mapping[str, str] | None = None

    def of(self, tools: Sequence[Tool], name: str) -> str:
        """Return the field that has the schema of the function ``name``."""
        fields = self.tools
        if fields is None:
            fields = {tool.function.name: f"tools[{number}]" for number, tool in enumerate(tools)}
        return f"{fields[name]}.{self.parameters}" if self.parameters else fields[name]


IN_CHAT = SchemaPlaces()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """``plan``: the reply's. ``tool_format``: None if there is nothing to call. ``asked``: the answer's constraint."""

    plan: ChatPlan
    tool_format: ToolFormat | None
    asked: FieldConstraint | None
    places: SchemaPlaces


async def enforced(context: Context, wanted: Wanted) -> Constraint | None:
    """Return what the output must match, compiled. Raises ValidationError, ToolError, NoShardError."""
    engine, tools = context.engine, wanted.plan.tools
    tool_format, asked = wanted.tool_format, wanted.asked
    beside = None
    if tool_format is not None and tools.strict and asked is None and opens_calls(tool_format):
        thought = wanted.plan.thought
        beside = frozenset[str]() if thought is None else thought.thought_format.controls
    if tool_format is None or not (tools.required or asked or beside is not None):
        return await compiled(engine, asked)
    functions = functions_of(template_tools(tools.callable))
    # An output that must call a tool is no answer.
    answer = None if asked is None or tools.required else asked.constraint.source
    try:
        constraint = await tool_constraint(
            engine, tool_format, functions, several=tools.several, answer=answer, beside=beside
        )
    except UnsupportedToolError as error:
        raise _error(wanted, error.name, str(error)) from error
    size, limit = len(constraint.source.encode()), context.limits.max_constraint_bytes
    if size > limit:
        raise ToolError(f"the grammar of `tools` must have at most {limit} bytes. Given: {size}", "tools")
    problem = await engine.queries.compile_constraint(constraint)
    if problem is None:
        return constraint
    # The answer's format may be the cause, too.
    if answer is not None:
        await compiled(engine, asked)
    name, problem = await _cause(context, tool_format, functions, problem)
    raise _error(wanted, name, problem)


async def _cause(
    context: Context, tool_format: ToolFormat, functions: Functions, problem: str
) -> tuple[str | None, str]:
    """Return which of ``functions``, with whose grammar there is a ``problem``, has it by itself, and what it is.

    The name is None if only all of them together have it.
    """
    names = [*functions]
    while len(names) > 1:
        half = names[: len(names) // 2]
        found = await _problem(context, tool_format, {name: functions[name] for name in half})
        if found is None:
            half = names[len(half) :]
            found = await _problem(context, tool_format, {name: functions[name] for name in half})
        if found is None:
            return None, problem
        names, problem = half, found
    return names[0], problem


async def _problem(context: Context, tool_format: ToolFormat, functions: Functions) -> str | None:
    constraint = await tool_constraint(context.engine, tool_format, functions, several=False)
    return await context.engine.queries.compile_constraint(constraint)


def _error(wanted: Wanted, name: str | None, problem: str) -> ToolError:
    tools = wanted.plan.tools.tools
    field = "tools" if name is None else wanted.places.of(tools, name)
    return ToolError(f"`{field}` cannot be enforced: {problem}", field)
