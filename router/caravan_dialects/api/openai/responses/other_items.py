"""Items of tools that others run, and of types that are not known: what of them the model is shown.

They are stored and returned as they came. The model is shown calls of functions, their outputs and messages.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from caravan_dialects.api.openai.responses.items import text_part
from caravan_dialects.api.openai.responses.tools import ToolName, model_name
from caravan_dialects.conversations.nodes import Json

PLAIN = frozenset(
    {
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    }
)
"""Types of the items that the model is shown as they are."""

# Nothing to read: the answer has the result, or there is none yet, or it is for a server that runs the tool.
_SILENT = frozenset(
    {
        "additional_tools",
        "compaction_trigger",
        "configuration_update",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "web_search_call",
    }
)
_ROLES = frozenset({"user", "assistant", "system", "developer"})

# Of calls: the name of the tool, and the key of its arguments. Of outputs: the same of the call, and the key.
_CALLS = {
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
    "local_shell_call": ("local_shell", "action"),
    "program": ("program", "code"),
    "shell_call": ("shell", "action"),
    "tool_search_call": ("tool_search", "arguments"),
}
_OUTPUTS = {
    "apply_patch_call_output": ("apply_patch", "output"),
    "computer_call_output": ("computer", "output"),
    "local_shell_call_output": ("local_shell", "output"),
    "program_output": ("program", "result"),
    "shell_call_output": ("shell", "output"),
    "tool_search_output": ("tool_search", "tools"),
}


def plain_items(item: Json) -> Sequence[Json]:
    """Return what the model is shown of an item: items of `PLAIN` types, none if it has nothing to read."""
    kind = item["type"]
    if kind in PLAIN:
        return (item,)
    if kind in _SILENT:
        return ()
    if kind in _CALLS:
        name, key = _CALLS[kind]
        return [_call(item, ToolName(name), item.get(key), key, item.get("call_id") or name)]
    if kind in _OUTPUTS:
        name, key = _OUTPUTS[kind]
        return [_output(item, _result(item, kind, key), item.get("call_id") or name)]
    return _FORMS.get(kind, _unknown)(item)


def _result(item: Json, kind: str, key: str) -> str | list[Json]:
    match kind, item.get(key):
        case "tool_search_output", list(tools):
            return f"Found tools: {', '.join(_tool_names(tools)) or 'none'}"
        case "computer_call_output", {"image_url": str(url)}:
            return [{"type": "input_image", "image_url": url, "detail": "auto"}]
        case _, result:
            # A patch may have no log but an outcome.
            return _text(result) or _text(item.get("status"))


def _tool_names(tools: Sequence[Any]) -> list[str]:
    """Return the names by which the model knows the tools that a search has found."""
    names = []
    for tool in tools:
        match tool:
            case {"type": "namespace", "name": str(namespace), "tools": list(inner)}:
                named = [one["name"] for one in inner if isinstance(one, dict) and isinstance(one.get("name"), str)]
                names += [model_name(ToolName(name, namespace)) for name in named]
            case {"name": str(name)}:
                names.append(name)
            case _:
                pass
    return names


def _compaction(item: Json) -> Sequence[Json]:
    """Only the server that encrypted a summary can read it. A summary in words has spaces."""
    sealed = item.get("encrypted_content")
    known = _content(item) or (sealed if isinstance(sealed, str) and " " in sealed.strip() else "")
    return [_message(item, "user", known)] if known else ()


def _mcp_call(item: Json) -> Sequence[Json]:
    name, server = item.get("name"), item.get("server_label")
    if not isinstance(name, str):
        return ()
    tool = ToolName(name, server if isinstance(server, str) else None)
    call = _call(item, tool, item.get("arguments"), "arguments", item["id"])
    return [call, _output(item, _text(item.get("output")) or _error_text(item.get("error")), item["id"])]


def _error_text(error: Any) -> str:
    match error:
        case {"message": str(text)}:
            return f"Error: {text}"
        case {"content": [*content]}:
            return f"Error: {_text(content)}"
        case _:
            return _text(error)


def _code_call(item: Json) -> Sequence[Json]:
    call = _call(item, ToolName("code_interpreter"), item.get("code"), "code", item["id"])
    return [call, _output(item, _text(item.get("outputs")), item["id"])]


def _file_search(item: Json) -> Sequence[Json]:
    if not item.get("results"):
        return ()
    call = _call(item, ToolName("file_search"), item.get("queries"), "queries", item["id"])
    return [call, _output(item, _text(item["results"]), item["id"])]


def _unknown(item: Json) -> Sequence[Json]:
    """Read the fields that items of other types have for the same."""
    name, call_id = item.get("name"), item.get("call_id")
    arguments = next((item[key] for key in ("arguments", "input") if item.get(key) is not None), None)
    result = next((item[key] for key in ("output", "result") if item.get(key) is not None), None)
    found: list[Json] = []
    if isinstance(name, str) and arguments is not None:
        namespace = item.get("namespace")
        tool = ToolName(name, namespace if isinstance(namespace, str) else None)
        found.append(_call(item, tool, arguments, "input", call_id or item["id"]))
    if result is not None and (found or call_id):
        found.append(_output(item, _text(result), call_id or item["id"]))
    if not found and (text := _content(item)):
        role = item.get("role")
        found.append(_message(item, role if isinstance(role, str) and role in _ROLES else "user", text))
    return found


_FORMS: Mapping[str, Callable[[Json], Sequence[Json]]] = {
    "code_interpreter_call": _code_call,
    "compaction": _compaction,
    "file_search_call": _file_search,
    "mcp_call": _mcp_call,
}


def _call(item: Json, tool: ToolName, given: Any, key: str, call_id: Any) -> Json:
    """Return a call; ``given`` is its object of arguments, or the argument named ``key``."""
    arguments = _arguments(given, key)
    namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
    called = {"call_id": str(call_id), "name": tool.name, "arguments": arguments}
    return {"id": item["id"], "type": "function_call", **called, **namespace}


def _arguments(given: Any, key: str) -> str:
    if isinstance(given, str):
        try:
            msgspec.json.decode(given, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            return given
    if given is None:
        return "{}"
    return _json(given if isinstance(given, dict) else {key: given})


def _output(item: Json, output: str | list[Json], call_id: Any) -> Json:
    return {"id": item["id"], "type": "function_call_output", "call_id": str(call_id), "output": output}


def _message(item: Json, role: str, text: str) -> Json:
    return {"id": item["id"], "type": "message", "role": role, "content": [text_part("input_text", text)]}


def _content(item: Json) -> str:
    """Return the text that an item tells, if it has one."""
    return next((text for key in ("content", "text", "summary") if (text := _words(item.get(key)))), "")


def _words(value: Any) -> str:
    match value:
        case str(text):
            return text
        case {"text": str(text)}:
            return text
        case [*values]:
            return "".join(map(_words, values))
        case _:
            return ""


def _text(value: Any) -> str:
    """Return a result as text, for a tool whose results may have any form."""
    match value:
        case None:
            return ""
        case str(text) | {"text": str(text)} | {"logs": str(text)}:
            return text
        case {"type": "input_image" | "image" | "computer_screenshot"}:
            return "[image]"
        case {"stdout": out, "stderr": err, **more}:
            return "\n".join(filter(None, (_text(out).rstrip("\n"), _text(err).rstrip("\n"), _outcome(more))))
        case [*values]:
            return "\n".join(filter(None, map(_text, values)))
        case _:
            return _json(value)


def _outcome(command: Mapping[Any, Any]) -> str:
    match command.get("outcome"):
        case {"type": "exit", "exit_code": 0}:
            return ""
        case {"type": "exit", "exit_code": code}:
            return f"[exit code {code}]"
        case {"type": str(kind)}:
            return f"[{kind}]"
        case _:
            return ""


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
