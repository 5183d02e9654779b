"""The parts of an item's content, in the one form in which they are stored: texts, pictures and sounds."""

from typing import Any

from caravan_dialects.api.generation.parts import MediaParts, data_of, text_for
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.rules import missing_field_error
from caravan_dialects.conversations.nodes import Json

Content = str | list[dict[str, Any]]

_TEXTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})


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
