"""The tools of a response: functions, custom tools as functions of one text, both in namespaces, a search for more.

Tools of MCP servers are in the namespace of their server. Others are left out: nobody here runs them. Models and their
templates know no namespaces, so a tool of a namespace has both names in one, the one name by which the model knows it.
"""

import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.messages import FUNCTION_NAME, MAX_DEPTH, check_depth
from caravan_dialects.api.openai.chat.schema import ChosenFunction, FunctionDefinition, NamedToolChoice, Tool
from caravan_dialects.api.openai.responses.rules import ambiguous_tool_error
from caravan_dialects.api.openai.rules import function_name_error, missing_field_error
from caravan_dialects.conversations.nodes import Json
from caravan_dialects.tool_servers import McpTool

_MOST_CHARACTERS = 64
_DIGEST_CHARACTERS = 8
_OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]", re.ASCII)
_ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
_FUNCTION_FIELDS = {"description": None, "parameters": None, "strict": False}
ITEMS_WITH_TOOLS = frozenset({"additional_tools", "tool_search_output"})
"""Items whose tools are offered from then on."""


@dataclass(frozen=True, slots=True)
class ToolName:
    """What a client calls a tool. ``namespace``: None for a tool that is in none."""

    name: str
    namespace: str | None = None


def model_names(tools: Collection[ToolName]) -> dict[ToolName, str]:
    """Return the name by which the model knows each of ``tools``, which all differ. No two names are the same.

    A tool outside of namespaces keeps its name, and no name depends on the order: a prompt begins with the tools, and
    would not be found in the cache if one of them changed its name.
    """
    wanted = Counter(map(_joined, tools))
    names = {
        tool: _joined(tool)
        for tool in tools
        if FUNCTION_NAME.fullmatch(_joined(tool)) and (tool.namespace is None or wanted[_joined(tool)] == 1)
    }
    taken = set(names.values())
    for tool in tools:
        if tool not in names:
            names[tool] = _unused(tool, taken)
            taken.add(names[tool])
    return names


def model_name(tool: ToolName) -> str:
    """Return the name of a tool that is offered no longer."""
    return model_names([tool])[tool]


def _joined(tool: ToolName) -> str:
    return tool.name if tool.namespace is None else f"{tool.namespace}__{tool.name}"


def _unused(tool: ToolName, taken: Iterable[str]) -> str:
    """Return a name that ends with a digest, for one that is too long, taken or has other characters."""
    start = _OTHER_CHARACTERS.sub("_", _joined(tool))[: _MOST_CHARACTERS - _DIGEST_CHARACTERS - 1]
    for attempt in itertools.count():
        source = msgspec.json.encode([tool.namespace, tool.name, attempt])
        name = f"{start}_{hashlib.sha256(source).hexdigest()[:_DIGEST_CHARACTERS]}"
        if name not in taken:
            return name
    raise AssertionError("the count has no end")


_SEARCH = ToolName("tool_search")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """``tools``: for the model, by names that are unique. ``called``: what the client calls each of these.

    ``names``: the same the other way round. ``custom``: the model's names of custom tools. ``searches``: whether the
    model may ask the client for more tools, by calling `_SEARCH`. ``skipped``: types left out. ``places``: the field
    of the body that each tool is in, by the model's names. ``mcp``: the model's names of tools of MCP servers, and
    whether a call of each needs approval.
    """

    tools: Sequence[Tool]
    called: Mapping[str, ToolName]
    names: Mapping[ToolName, str]
    custom: frozenset[str]
    searches: bool
    skipped: frozenset[str]
    places: Mapping[str, str]
    mcp: Mapping[str, bool]

    def client_name(self, name: str) -> ToolName:
        """Return what the client calls the tool that the model calls ``name``."""
        return self.called.get(name) or ToolName(name)

    def is_search(self, name: str) -> bool:
        """Return whether the model calls the client's search for tools by ``name``."""
        return self.searches and self.called.get(name) == _SEARCH

    def model_name(self, tool: ToolName) -> str:
        """Return what the model calls a tool that was called, also if it is offered no longer."""
        return self.names.get(tool) or (tool.name if tool.namespace is None else model_name(tool))


@dataclass(frozen=True, slots=True)
class ServerTools:
    """The tools of an MCP server that a request may use, and the names of those whose calls need approval."""

    tools: Sequence[McpTool]
    needing_approval: frozenset[str]


def offered_tools(
    given: Sequence[Mapping[str, Any]], items: Iterable[Json] = (), servers: Mapping[str, ServerTools] | None = None
) -> OfferedTools:
    """Return the tools of a request, and those that ``items`` add. Raises ValidationError.

    What is wrong with a tool of an item is not refused but left out: the item may be one of many turns ago.
    ``servers``: MCP servers by their labels, once their tools are known.
    """
    found = _Found(servers or {})
    for number, tool in enumerate(given):
        found.add(f"tools[{number}]", tool)
    for item in items:
        if item["type"] in ITEMS_WITH_TOOLS:
            found.add_later(item)
    return found.offered()


class _Found:
    """The tools so far. ``skipped``: types left out."""

    def __init__(self, servers: Mapping[str, ServerTools]) -> None:
        self._servers = servers
        self._mcp: dict[ToolName, bool] = {}
        self._tools: dict[ToolName, Tool] = {}
        self._places: dict[ToolName, str] = {}
        self._custom: set[ToolName] = set()
        self._searches = False
        self._skipped: set[str] = set()

    def offered(self) -> OfferedTools:
        names = model_names(self._tools)
        tools = [_renamed(tool, names[called]) for called, tool in self._tools.items()]
        return OfferedTools(
            tools=tools,
            called={name: called for called, name in names.items()},
            names=names,
            custom=frozenset(names[called] for called in self._custom),
            searches=self._searches,
            skipped=frozenset(self._skipped),
            places={names[called]: place for called, place in self._places.items()},
            mcp={names[called]: asks for called, asks in self._mcp.items()},
        )

    def add_later(self, item: Json) -> None:
        tools = item.get("tools")
        for number, tool in enumerate(tools if isinstance(tools, list) else ()):
            try:
                self.add(f"tools[{number}]", tool, again=True)
            except ValidationError:
                self._skipped.add("tool that is not valid")

    def add(self, field: str, tool: Any, *, again: bool = False) -> None:
        """Add what a client sends. ``again``: a tool that is there already is no error."""
        match tool:
            case {"type": "namespace"}:
                # Its tools may be as deep as others.
                check_depth(field, tool, MAX_DEPTH + 3)
                self._add_namespace(field, tool, again=again)
            case {"type": "function" | "custom"}:
                # Its fields may be as deep as in chat.
                check_depth(field, tool, MAX_DEPTH + 1)
                if isinstance(name := tool.get("name"), str) and not FUNCTION_NAME.fullmatch(name):
                    raise function_name_error(f"{field}.name", name)
                self._add_tool(field, tool, None, again=again)
            case {"type": "tool_search", "execution": "client"} if _SEARCH not in self._tools:
                check_depth(field, tool, MAX_DEPTH + 1)
                self._places[_SEARCH] = field
                self._tools[_SEARCH] = _function(field, {"parameters": _QUERY, **tool, "name": _SEARCH.name}, "")
                self._searches = True
            case {"type": "mcp"}:
                check_depth(field, tool, MAX_DEPTH + 1)
                self._add_server(field, tool.get("server_label"))
            case {"type": str(kind)}:
                check_depth(field, tool, MAX_DEPTH + 1)
                self._skipped.add(kind)
            case _:
                raise missing_field_error(f"{field}.type")

    def _add_server(self, field: str, label: Any) -> None:
        server = self._servers.get(label) if isinstance(label, str) else None
        if server is None:
            return
        for tool in server.tools:
            called = ToolName(tool.name, label)
            if called not in self._tools:
                described = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
                self._places[called] = field
                self._tools[called] = _function(field, described, "")
                self._mcp[called] = tool.name in server.needing_approval

    def _add_namespace(self, field: str, group: Mapping[str, Any], *, again: bool) -> None:
        name, tools, about = group.get("name"), group.get("tools"), group.get("description")
        if not isinstance(name, str):
            raise missing_field_error(f"{field}.name")
        if not isinstance(tools, list):
            raise missing_field_error(f"{field}.tools")
        first = True
        for number, tool in enumerate(tools):
            place = f"{field}.tools[{number}]"
            match tool:
                case {"type": "function" | "custom"}:
                    # Each word costs tokens, so that only one tool tells about all.
                    shown = f"All tools of {name}: {about}" if first and isinstance(about, str) and about else ""
                    self._add_tool(place, tool, name, about=shown, again=again)
                    first = False
                case {"type": str(kind)}:
                    self._skipped.add(kind)
                case _:
                    raise missing_field_error(f"{place}.type")

    def _add_tool(
        self, field: str, tool: Mapping[str, Any], namespace: str | None, *, about: str = "", again: bool
    ) -> None:
        """``about``: added to the description."""
        if not isinstance(name := tool.get("name"), str):
            raise missing_field_error(f"{field}.name")
        called = ToolName(name, namespace)
        if called in self._tools:
            if not again:
                raise function_name_error(f"{field}.name", name)
            return
        self._places[called] = field
        self._tools[called] = _custom(tool, about) if tool["type"] == "custom" else _function(field, tool, about)
        if tool["type"] == "custom":
            self._custom.add(called)


def _function(field: str, tool: Mapping[str, Any], about: str) -> Tool:
    parameters, description = tool.get("parameters"), tool.get("description")
    if not isinstance(parameters, dict | None):
        raise unsupported_field_error(f"{field}.parameters", "send a JSON schema", parameters)
    if not isinstance(description, str | None):
        raise unsupported_field_error(f"{field}.description", "send a text", description)
    strict = tool.get("strict") is True
    if about:
        description = f"{description}\n\n{about}" if description else about
    return Tool(
        function=FunctionDefinition(name=tool["name"], description=description, parameters=parameters, strict=strict)
    )


def _custom(tool: Mapping[str, Any], about: str) -> Tool:
    parts = [tool.get("description") or ""]
    match tool.get("format"):
        case {"type": "grammar", "definition": str(definition)}:
            # A grammar inside a JSON string cannot be enforced.
            parts.append(f"The input must match this grammar:\n{definition}")
        case _:
            pass
    description = "\n\n".join(str(part) for part in (*parts, about) if part)
    return Tool(function=FunctionDefinition(name=tool["name"], description=description, parameters=_ONE_TEXT))


def _renamed(tool: Tool, name: str) -> Tool:
    return Tool(function=msgspec.structs.replace(tool.function, name=name))


def shown_tools(tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the tools of a request as a response shows them: functions have all their fields."""
    return [{**_FUNCTION_FIELDS, **tool} if tool.get("type") == "function" else {**tool} for tool in tools]


def custom_arguments(given: str) -> str:
    """Return the arguments with which the model calls a custom tool."""
    return msgspec.json.encode({"input": given}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool; the arguments themselves if they are no JSON of this form."""
    try:
        return msgspec.json.decode(arguments, type=_CustomArguments).input
    except (msgspec.DecodeError, RecursionError):
        return arguments


def search_arguments(arguments: str) -> Json:
    """Return the arguments of a search for tools; what the model wrote as its query if a client could not send them."""
    try:
        given = msgspec.json.decode(arguments, type=Json)
        check_depth("arguments", given, MAX_DEPTH - 1)
    except (msgspec.DecodeError, RecursionError, ValidationError):
        return {"query": arguments}
    return given


class _CustomArguments(msgspec.Struct, frozen=True):
    input: str


def chosen_tools(
    offered: OfferedTools, choice: str | Mapping[str, Any] | None
) -> tuple[Sequence[Tool], str | NamedToolChoice | None]:
    """Return the tools and ``tool_choice`` of chat completions. Raises ValidationError."""
    match choice:
        case None | "auto" | "none" | "required":
            return offered.tools, choice
        case {"type": "function" | "custom", "name": str(name), **more}:
            found = _Named(offered).by(name, more.get("namespace"))
            if len(found) > 1:
                raise ambiguous_tool_error(name)
            return offered.tools, NamedToolChoice(function=ChosenFunction(name=found[0] if found else name))
        case {"type": "mcp", "server_label": str(label), "name": str(name)}:
            known = offered.names.get(ToolName(name, label), name)
            return offered.tools, NamedToolChoice(function=ChosenFunction(name=known))
        case {"type": "mcp", "server_label": str(label)}:
            names = _Named(offered).allowed([choice])
            return [tool for tool in offered.tools if tool.function.name in names], "required"
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = _Named(offered).allowed(allowed)
            return [tool for tool in offered.tools if tool.function.name in names], mode
        case _:
            raise unsupported_field_error("tool_choice", "choose a function or custom tool by its name", choice)


class _Named:
    """Finds the model's names of tools by what clients call them."""

    def __init__(self, offered: OfferedTools) -> None:
        self._offered = offered
        self._by_name: dict[str, list[str]] = defaultdict(list)
        self._by_namespace: dict[str | None, list[str]] = defaultdict(list)
        for known, tool in offered.called.items():
            self._by_name[tool.name].append(known)
            self._by_namespace[tool.namespace].append(known)

    def by(self, name: str, namespace: Any) -> Sequence[str]:
        """Return the tool of this name; more than one if it is in several namespaces and none is given.

        A name without its namespace is that of a tool outside of namespaces, if there is one.
        """
        exact = self._offered.names.get(ToolName(name, namespace)) if isinstance(namespace, str | None) else None
        if exact is not None or namespace is not None:
            return () if exact is None else (exact,)
        return self._by_name.get(name) or ((name,) if name in self._offered.called else ())

    def allowed(self, entries: Sequence[Any]) -> set[str]:
        """Return all tools that ``entries`` name: functions and custom tools, or whole namespaces."""
        # A client may name the same many times.
        asked: set[tuple[bool, str, str | None]] = set()
        for entry in entries:
            match entry:
                case {"type": "mcp", "server_label": str(label), "name": str(name)}:
                    asked.add((False, name, label))
                case {"type": "namespace", "name": str(name)} | {"type": "mcp", "server_label": str(name)}:
                    asked.add((True, name, None))
                case {"name": str(name), **more} if isinstance(namespace := more.get("namespace"), str | None):
                    asked.add((False, name, namespace))
                case _:
                    pass
        return {
            known
            for whole, name, namespace in asked
            for known in (self._by_namespace.get(name, ()) if whole else self.by(name, namespace))
        }
