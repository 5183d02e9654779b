"""Which of the tools of a response the model may call, or must."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.schema import ChosenFunction, NamedToolChoice, Tool
from caravan_dialects.api.openai.responses.rules import ambiguous_tool_error
from caravan_dialects.api.openai.responses.tool_names import ToolName
from caravan_dialects.api.openai.responses.tools import OfferedTools


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
                case {"type": "namespace", "name": str(name)}:
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
