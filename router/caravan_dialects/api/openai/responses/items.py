"""Reads the items that clients send, and their parts, into the one form in which they are stored and returned."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from caravan_dialects.api.body import mismatch
from caravan_dialects.api.generation.parts import MediaParts, data_of, text_for
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.messages import check_depth
from caravan_dialects.api.openai.responses.rules import (
    item_type_error,
    items_size_error,
    too_many_items_error,
    unknown_item_error,
)
from caravan_dialects.api.openai.responses.schema import ItemList
from caravan_dialects.api.openai.responses.tools import ToolName
from caravan_dialects.api.openai.rules import missing_field_error
from caravan_dialects.api.paging import is_newest_first, page_size
from caravan_dialects.conversations.nodes import Json, new_id

Content = str | list[dict[str, Any]]

_TEXTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})
MAX_ITEMS = 10_000
"""Items of a request with those that it continues, and of a conversation."""
MAX_BYTES = 32 << 20
"""Size of these items as JSON."""
# Ids are parts of paths.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
T = TypeVar("T")


def read_parts(field: str, content: Content, *, of_tool: bool = False) -> list[Json]:
    """Return the parts of what a client sends. ``of_tool``: see `text_for`. Raises ValidationError."""
    if isinstance(content, str):
        return [text_part("input_text", content)]
    return [_part(f"{field}[{number}]", part, of_tool=of_tool) for number, part in enumerate(content)]


def _part(field: str, part: Json, *, of_tool: bool) -> Json:
    match part.get("type"):
        case "input_image":
            url = part.get("image_url")
            if part.get("file_id"):
                raise unsupported_field_error(f"{field}.file_id", "send `image_url`", part["file_id"])
            if not isinstance(url, str):
                raise missing_field_error(f"{field}.image_url")
            if not of_tool:
                data_of(f"{field}.image_url", url)
            detail = part.get("detail")
            return {"type": "input_image", "image_url": url, "detail": detail if isinstance(detail, str) else "auto"}
        case "input_audio":
            sound = part.get("input_audio")
            if not isinstance(sound, dict) or not isinstance(sound.get("data"), str):
                raise missing_field_error(f"{field}.input_audio.data")
            form = sound.get("format")
            heard = {"data": sound["data"], "format": form if isinstance(form, str) else "wav"}
            return {"type": "input_audio", "input_audio": heard}
        case _:
            return text_part("input_text", text_of_part(field, part, of_tool=of_tool))


def text_of_part(field: str, part: Json, *, of_tool: bool = False) -> str:
    """Return the text of a part that a client sends. ``of_tool``: see `text_for`. Raises ValidationError."""
    kind, text = str(part.get("type")), part.get("text", part.get("refusal"))
    if kind not in _TEXTS:
        return text_for(field, kind, of_tool=of_tool)
    if not isinstance(text, str):
        raise missing_field_error(f"{field}.text")
    return text


def text_part(kind: str, text: str) -> Json:
    """Return a part of a message: an "input_text" or an "output_text"."""
    return {"type": kind, "text": text, **({"annotations": [], "logprobs": []} if kind == "output_text" else {})}


def with_whole_parts(item: Json) -> Json:
    """Return an item of any type, in which pictures and sounds are texts, as the store expects; others are named."""
    for key in ("content", "output"):
        if isinstance(parts := item.get(key), list):
            item = item | {key: [_whole_part(part) for part in parts]}
    return item


def _whole_part(part: Any) -> Any:
    match part:
        case {"type": "input_image", "image_url": str()} | {"type": "input_audio", "input_audio": {"data": str()}}:
            return part
        case {"type": "input_image" | "input_audio" as kind}:
            return text_part("input_text", text_for("", kind, of_tool=True))
        case _:
            return part


def shown_part(field: str, part: Json, media: MediaParts, *, of_tool: bool) -> str:
    """Return the text of a part as it is stored; of a picture or a sound, its mark. Raises ValidationError."""
    match part["type"]:
        case "input_image" if media.sees:
            return media.picture_at(f"{field}.image_url", part["image_url"])
        case "input_audio" if media.hears:
            return media.sound(f"{field}.input_audio.data", part["input_audio"]["data"])
        case "input_image" | "input_audio" as kind:
            return text_for(field, kind, of_tool=of_tool)
        case _:
            text: str = part["text"]
            return text


DEFAULT_LIMIT, MAX_LIMIT = 20, 100


def page_of(query: Mapping[str, str], items: Sequence[Json]) -> ItemList:
    """Return the page of ``items``, the oldest first, that a query asks for. Raises ValidationError."""
    ordered = list(reversed(items)) if is_newest_first(query) else list(items)
    limit = page_size(query, DEFAULT_LIMIT, MAX_LIMIT)
    if (after := query.get("after")) is not None:
        place = next((at for at, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise unknown_item_error("after", after)
        ordered = ordered[place + 1 :]
    return item_list(ordered[:limit], more=len(ordered) > limit)


def item_list(items: Sequence[Json], *, more: bool = False) -> ItemList:
    """Return a page of these items. ``more``: whether others follow."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return ItemList(list(items), first, last, more)


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    call_id: str
    arguments: str
    namespace: str | None = None


class _CustomCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    call_id: str
    input: str
    namespace: str | None = None


class _Output(msgspec.Struct, frozen=True, kw_only=True):
    call_id: str
    output: Content


class _Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    summary: list[dict[str, Any]] = msgspec.field(default_factory=list)
    content: list[dict[str, Any]] | None = None


def read_items(field: str, given: str | Sequence[Json], earlier: Mapping[str, Json]) -> tuple[Json, ...]:
    """Return ``given`` with new ids. A reference becomes a copy of the item of ``earlier`` that it names.

    Raises ValidationError, which names the place in ``field``.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}] if given else []
    if len(earlier) + len(given) > MAX_ITEMS:
        raise too_many_items_error(field, MAX_ITEMS, len(earlier) + len(given))
    read = tuple(_item(f"{field}[{number}]", item, earlier) for number, item in enumerate(given))
    return _with_new_links(given, read)


def _with_new_links(given: Sequence[Json], read: tuple[Json, ...]) -> tuple[Json, ...]:
    """Let approvals of calls name the requests among ``read``, those of ``given`` with new ids, by these."""
    new = {
        old["id"]: item["id"]
        for old, item in zip(given, read, strict=True)
        if item["type"] == "mcp_approval_request" and isinstance(old.get("id"), str)
    }

    def linked(item: Json) -> Json:
        named = item.get("approval_request_id")
        return item | {"approval_request_id": new[named]} if isinstance(named, str) and named in new else item

    return tuple(map(linked, read)) if new else read


def check_size(field: str, items: Iterable[Json], before: int = 0) -> None:
    """Raise ValidationError if ``items`` and ``before`` bytes of others are too large together.

    References make copies, so that a small request can have huge items.
    """
    size = before
    for item in items:
        size += len(msgspec.json.encode(item))
        if size > MAX_BYTES:
            raise items_size_error(field, MAX_BYTES)


def _item(field: str, item: Json, earlier: Mapping[str, Json]) -> Json:
    kind = item.get("type", "message" if "role" in item else "item_reference" if "id" in item else None)
    if kind == "item_reference":
        if not isinstance(named := item.get("id"), str) or named not in earlier:
            raise unknown_item_error(f"{field}.id", named)
        return earlier[named] | {"id": new_id(earlier[named]["id"].partition("_")[0])}
    if isinstance(kind, str) and kind in _READERS:
        return _READERS[kind](field, item)
    if isinstance(kind, str):
        return _other(field, item)
    raise item_type_error(f"{field}.type", kind)


def _other(field: str, item: Json) -> Json:
    """Keep an item as it is. A turn never fails for one of many turns ago that another server made."""
    check_depth(field, item)
    if item["type"] == "local_shell_call_output" and "call_id" not in item:
        # Its call is named by its id, which is new here.
        item = item | {"call_id": item.get("id")}
    return with_whole_parts(item) | {"id": new_id("item")}


def _message(field: str, item: Json) -> Json:
    message = _convert(field, item, _Message)
    place = f"{field}.content"
    if message.role == "assistant":
        # Its texts have a type of their own.
        parts = [text_part("output_text", text) for text in _texts(place, message.content)]
    else:
        parts = read_parts(place, message.content)
    return message_item(new_id("msg"), message.role, parts)


def message_item(item_id: str, role: str, parts: list[Json], status: str = "completed") -> Json:
    """Return a message; ``parts`` are its content."""
    return {"id": item_id, "type": "message", "status": status, "role": role, "content": parts}


def _function_call(field: str, item: Json) -> Json:
    call = _convert(field, item, _Call)
    return function_call_item(new_id("fc"), call.call_id, ToolName(call.name, call.namespace), call.arguments)


def _custom_call(field: str, item: Json) -> Json:
    call = _convert(field, item, _CustomCall)
    return custom_call_item(new_id("ctc"), call.call_id, ToolName(call.name, call.namespace), call.input)


def function_call_item(item_id: str, call_id: str, tool: ToolName, arguments: str, status: str = "completed") -> Json:
    """Return a call of a function; ``arguments`` is JSON text."""
    call = {"call_id": call_id, **_named(tool), "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **call}


def custom_call_item(item_id: str, call_id: str, tool: ToolName, given: str, status: str = "completed") -> Json:
    """Return a call of a custom tool, whose input is any text."""
    call = {"call_id": call_id, **_named(tool), "input": given}
    return {"id": item_id, "type": "custom_tool_call", "status": status, **call}


def tool_search_item(item_id: str, call_id: str, arguments: Json, status: str = "completed") -> Json:
    """Return a call of the client's search for tools."""
    call = {"call_id": call_id, "execution": "client", "arguments": arguments}
    return {"id": item_id, "type": "tool_search_call", "status": status, **call}


def _named(tool: ToolName) -> Json:
    """Return how a call names its tool: by its own name, beside that of its namespace."""
    return {"name": tool.name} if tool.namespace is None else {"namespace": tool.namespace, "name": tool.name}


def _output_of(kind: str, prefix: str) -> Callable[[str, Json], Json]:
    def read(field: str, item: Json) -> Json:
        given = _convert(field, item, _Output)
        parts = read_parts(f"{field}.output", given.output, of_tool=True)
        texts = [part["text"] for part in parts if part["type"] == "input_text"]
        output = "".join(texts) if len(texts) == len(parts) else parts
        return {"id": new_id(prefix), "type": kind, "status": "completed", "call_id": given.call_id, "output": output}

    return read


def _reasoning(field: str, item: Json) -> Json:
    thoughts = _convert(field, item, _Reasoning)
    texts = _texts(f"{field}.content", thoughts.content or [])
    summaries = _texts(f"{field}.summary", thoughts.summary)
    return reasoning_item(new_id("rs"), "".join(texts), summaries=summaries)


def reasoning_item(item_id: str, text: str, status: str = "completed", summaries: Sequence[str] = ()) -> Json:
    """Return what a model thought, as it wrote it."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    summary = [{"type": "summary_text", "text": one} for one in summaries]
    return {"id": item_id, "type": "reasoning", "status": status, "summary": summary, "content": content}


_READERS: dict[str, Callable[[str, Json], Json]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _output_of("function_call_output", "fco"),
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output_of("custom_tool_call_output", "cto"),
    "reasoning": _reasoning,
}


def _texts(field: str, content: Content) -> list[str]:
    """Return the texts of a content that has nothing else."""
    if isinstance(content, str):
        return [content]
    return [text_of_part(f"{field}[{number}]", part) for number, part in enumerate(content)]


def _convert(field: str, item: Json, kind: type[T]) -> T:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise mismatch(error, field) from error


def read_exported_item(field: str, item: Json) -> Json:
    """Return an item of an export in the form of stored items. It keeps its id. Raises ValidationError."""
    if not isinstance(item.get("id"), str) or not _ID.fullmatch(item["id"]):
        raise unsupported_field_error(f"{field}.id", "use that of an export", item.get("id"))
    read = _item(field, item, {}) | {"id": item["id"]}
    return read | {"status": "incomplete"} if item.get("status") == "incomplete" else read
