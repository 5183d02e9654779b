"""Makes the messages of a chat of Gemini's contents, and the texts that its embedding routes embed."""

import base64
import binascii
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import msgspec

from caravan_dialects.api.gemini.schema import (
    Blob,
    Content,
    ContentEmbedding,
    ContentPartBody,
    EmbedContentRequest,
    FunctionCallPart,
    FunctionResponsePart,
)
from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.parts import NO_MEDIA, MediaParts, text_for
from caravan_dialects.api.generation.prompt import check_token_ids, tokenize_texts
from caravan_dialects.api.generation.rules import (
    empty_prompt_error,
    media_file_error,
    not_text_error,
    too_many_prompts_error,
    unsupported_field_error,
)
from caravan_dialects.api.openai.chat.schema import FunctionCall, Message, ToolCall
from caravan_dialects.api.openai.embeddings import Vectors, shortened
from caravan_dialects.api.openai.rules import missing_field_error

# Between turns that become one, and between thoughts.
_BREAK = "\n\n"
# What a function has returned, if it is a text alone; Google recommends the first and the last, its package writes all.
_RESULTS = {"output": "", "result": "", "error": "Error: "}
# Base64 for URLs, which Google's packages write, as the usual one.
_USUAL = str.maketrans("-_", "+/")

# A field's name and its part.
_Named = tuple[str, ContentPartBody]


@dataclass(slots=True)
class _Calls:
    """Gives calls without an id one, and results without an id that of the first open call of their function."""

    made: int = 0
    unanswered: dict[str, deque[str]] = field(default_factory=dict)

    def called(self, call: FunctionCallPart) -> str:
        self.made += 1
        if call.id:
            return call.id
        call_id = f"call_{self.made}"
        self.unanswered.setdefault(call.name, deque()).append(call_id)
        return call_id

    def answered(self, result: FunctionResponsePart) -> str | None:
        waiting = self.unanswered.get(result.name)
        return result.id or (waiting.popleft() if waiting else None)


def chat_messages_of(contents: Sequence[Content] | Content, system: Content | None, media: MediaParts) -> list[Message]:
    """Return the messages of a chat. Pictures and sounds are added to ``media``. Raises ValidationError."""
    given = [contents] if isinstance(contents, Content) else contents
    if not given:
        raise empty_prompt_error("contents")
    instruction = [] if system is None else [text_of(named) for named in parts_of("systemInstruction", system)]
    turns: list[tuple[str, list[_Named]]] = []
    for number, content in enumerate(given):
        parts = list(parts_of(f"contents[{number}]", content))
        if content.role == "system":
            instruction += [text_of(named) for named in parts]
            continue
        turns.append(("assistant" if content.role == "model" else "user", parts))
    text = "\n".join(text for text in instruction if text)
    messages = [Message(role="system", content=text)] if text else []
    calls = _Calls()
    # Templates want alternating turns.
    for role, group in groupby(turns, itemgetter(0)):
        said = [parts for _, parts in group]
        messages += [_model(said, calls)] if role == "assistant" else _user(said, calls, media)
    return messages


def parts_of(name: str, content: Content) -> Iterator[_Named]:
    """Yield the parts of ``content`` with their fields' names."""
    given = content.parts or []
    for number, part in enumerate([given] if isinstance(given, ContentPartBody) else given):
        yield f"{name}.parts[{number}]", part


def text_of(named: _Named, media: MediaParts = NO_MEDIA) -> str:
    """Return the text of a part, or the mark of its picture or sound. Raises ValidationError."""
    name, part = named
    if part.text is not None:
        return part.text
    if part.inline_data is not None:
        return _text_of_blob(f"{name}.inlineData", part.inline_data, media)
    if part.file_data is not None:
        advice = "send the file as `inlineData`: nothing is fetched"
        raise unsupported_field_error(f"{name}.fileData", advice, part.file_data.file_uri)
    if part.executable_code is not None:
        return part.executable_code.code
    if part.code_execution_result is not None:
        return part.code_execution_result.output or ""
    if part.function_call is not None:
        raise unsupported_field_error(f"{name}.functionCall", 'set the `role` to "model"', part.function_call.name)
    if part.function_response is not None:
        advice = 'set the `role` to "user"'
        raise unsupported_field_error(f"{name}.functionResponse", advice, part.function_response.name)
    # A part may have a signature alone.
    if part.thought_signature is None:
        raise missing_field_error(f"{name}.text")
    return ""


def _text_of_blob(name: str, blob: Blob, media: MediaParts, *, of_tool: bool = False) -> str:
    kind = blob.mime_type.partition("/")[0]
    data = blob.data.translate(_USUAL)
    match kind:
        case "image":
            return media.picture(f"{name}.data", data) if media.sees else text_for(name, "image", of_tool=of_tool)
        case "audio":
            return media.sound(f"{name}.data", data) if media.hears else text_for(name, "input_audio", of_tool=of_tool)
        case "text":
            try:
                return base64.b64decode(data, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError, ValueError) as error:
                raise media_file_error(f"{name}.data", "must be text in UTF-8, as base64") from error
        case _ if of_tool:
            return text_for(name, "input_file", of_tool=True)
        case "":
            raise missing_field_error(f"{name}.mimeType")
        case _:
            raise not_text_error(name, blob.mime_type, "the model reads only text, images and audio")


def _model(said: Sequence[Sequence[_Named]], calls: _Calls) -> Message:
    texts, thoughts, called = list[str](), list[str](), list[ToolCall]()
    for name, part in (named for parts in said for named in parts):
        if (call := part.function_call) is not None:
            if not call.name:
                raise missing_field_error(f"{name}.functionCall.name")
            function = FunctionCall(name=call.name, arguments=call.args or {})
            called.append(ToolCall(function=function, id=calls.called(call)))
        elif part.thought:
            thoughts.append(part.text or "")
        else:
            texts.append(text_of((name, part)))
    return Message(
        role="assistant",
        # The text of a last message is continued: nothing may be added to its end.
        content="".join(texts),
        reasoning_content=_BREAK.join(text for text in thoughts if text) or None,
        tool_calls=called or None,
    )


def _user(said: Sequence[Sequence[_Named]], calls: _Calls, media: MediaParts) -> list[Message]:
    """Return the results of functions, which follow the calls, and the message of a user's turn."""
    results: list[Message] = []
    texts: list[str] = []
    for parts in said:
        shown: list[str] = []
        for name, part in parts:
            if part.function_response is not None:
                results.append(_result(f"{name}.functionResponse", part.function_response, calls, media))
            elif not part.thought:
                shown.append(text_of((name, part), media))
        if text := media.joined(shown):
            texts.append(text)
    return results if results and not texts else [*results, Message(role="user", content=_BREAK.join(texts))]


def _result(name: str, result: FunctionResponsePart, calls: _Calls, media: MediaParts) -> Message:
    if not result.name:
        raise missing_field_error(f"{name}.name")
    shown = [_returned(result)]
    for number, file in enumerate(result.parts or ()):
        where = f"{name}.parts[{number}]"
        if file.inline_data is not None:
            shown.append(_text_of_blob(f"{where}.inlineData", file.inline_data, media, of_tool=True))
        elif file.file_data is not None:
            shown.append(text_for(f"{where}.fileData", "input_file", of_tool=True))
    return Message(role="tool", name=result.name, content=media.joined(shown), tool_call_id=calls.answered(result))


def _returned(result: FunctionResponsePart) -> str:
    response = result.response or {}
    if len(response) == 1:
        [(key, value)] = response.items()
        if key in _RESULTS and isinstance(value, str):
            return _RESULTS[key] + value
    return msgspec.json.encode(response).decode() if response else ""


async def texts_of(
    requests: Sequence[EmbedContentRequest], context: Context, within: str = "requests"
) -> list[tuple[int, ...]]:
    """Return the token ids of each text. ``within``: the list in the body; "" for a body that is the only request.

    Raises ValidationError, EngineError.
    """
    most = context.limits.max_embed_texts
    if len(requests) > most:
        raise too_many_prompts_error(within, most, len(requests))
    names = [f"{within}[{number}]." if within else "" for number in range(len(requests))]
    texts = []
    for name, request in zip(names, requests, strict=True):
        check_range(f"{name}outputDimensionality", request.output_dimensionality, 1, context.model.embedding_size)
        texts.append(_text(f"{name}content", request.content))
    tokens = await tokenize_texts(context.engine, within or "content", texts, context.bounds)
    for name, token_ids in zip(names, tokens, strict=True):
        check_token_ids(f"{name}content", token_ids, context.model.max_embed_tokens, context.model)
    return tokens


def embeddings_of(requests: Sequence[EmbedContentRequest], made: Vectors) -> list[ContentEmbedding]:
    """Return a vector for each request."""
    return [
        ContentEmbedding(shortened(vector, request.output_dimensionality))
        for request, vector in zip(requests, made.vectors, strict=True)
    ]


def _text(field: str, content: Content) -> str:
    text = "\n".join(text_of(named) for named in parts_of(field, content))
    if not text:
        raise empty_prompt_error(field)
    return text
