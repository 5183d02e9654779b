"""What the model reads of a block: a text, or the mark of a picture."""

from collections.abc import Iterable
from typing import Any

import msgspec

from caravan_dialects.api.anthropic.schema import Block, Source
from caravan_dialects.api.generation.parts import NO_MEDIA, MediaParts, text_for
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.rules import missing_field_error

# Of results of tools that Anthropic runs: what only Anthropic can read.
_SEALED = "encrypted_"


def joined_lines(texts: Iterable[str | None]) -> str:
    """Return those of ``texts`` that are not empty, a line break between two of them."""
    return "\n".join(text for text in texts if text)


def shown_block(field: str, block: Block, media: MediaParts, *, of_tool: bool = False) -> str:
    """Return the text of a block, or the mark of its picture. ``of_tool``: see `text_for`. Raises ValidationError."""
    if block.type != "image" or not media.sees:
        return text_of_block(field, block, of_tool=of_tool)
    source = block.source
    if not isinstance(source, Source) or source.type is None:
        raise missing_field_error(f"{field}.source.type")
    if source.type != "base64":
        neutral = 'set it to "base64": nothing is fetched'
        raise unsupported_field_error(f"{field}.source.type", neutral, source.type)
    if source.data is None:
        raise missing_field_error(f"{field}.source.data")
    return media.picture(f"{field}.source.data", source.data)


def text_of_block(field: str, block: Block, *, of_tool: bool = False) -> str:
    """Return the text of a block. ``of_tool``: see `text_for`. Raises ValidationError."""
    match block:
        case Block(type="text", text=str(text)):
            return text
        case Block(type="text"):
            raise missing_field_error(f"{field}.text")
        case Block(type="document", source=Source(type="text", data=str(text))):
            return joined_lines((block.title, block.context, text))
        case Block(type="document", source=Source(type="content", content=content)) if content is not None:
            text = _content_text(f"{field}.source.content", content, of_tool=of_tool)
            return joined_lines((block.title, block.context, text))
        case Block(type="search_result", source=source, content=content):
            text = _content_text(f"{field}.content", content, of_tool=of_tool)
            return joined_lines((block.title, source if isinstance(source, str) else None, text))
        case Block(type="web_search_result"):
            return joined_lines((block.title, block.url))
        case Block(type="tool_reference", tool_name=str(name)):
            return name
        case Block(type="tool_reference"):
            raise missing_field_error(f"{field}.tool_name")
        case _:
            return text_for(field, block.type, of_tool=of_tool)


def result_text(field: str, block: Block, media: MediaParts = NO_MEDIA) -> str:
    """Return what a tool has answered, with marks of pictures. Raises ValidationError."""
    content = block.content
    if isinstance(content, list):
        named = ((f"{field}.content[{number}]", inner) for number, inner in enumerate(content))
        return media.joined(shown_block(name, inner, media, of_tool=True) for name, inner in named)
    return _content_text(f"{field}.content", content, of_tool=True)


def _content_text(field: str, content: str | list[Block] | dict[str, Any] | None, *, of_tool: bool) -> str:
    match content:
        case None:
            return ""
        case str(text):
            return text
        case dict(result):
            # Such as what a program has printed, of a tool that Anthropic has run.
            return msgspec.json.encode({k: v for k, v in result.items() if not k.startswith(_SEALED)}).decode()
        case blocks:
            named = enumerate(blocks)
            return joined_lines(text_of_block(f"{field}[{at}]", block, of_tool=of_tool) for at, block in named)
