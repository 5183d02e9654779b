"""Turns a conversation into the tokens of a prompt."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from caravan_dialects.chat.control_text import draw_mark, marks_for, strings_of
from caravan_dialects.chat.media_marks import with_media
from caravan_dialects.chat.template_errors import TemplateError
from caravan_dialects.chat.template_renderer import TemplateRenderer
from caravan_dialects.chat.thought_prompt import ThoughtPlan
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.engine import ModelFacts, TextEngine
from caravan_scheduler.core.media import Media
from caravan_scheduler.core.prompt_media import PromptMedia

_NO_TEMPLATE = (
    "the model has no chat template: serve a GGUF file with `tokenizer.chat_template`, "
    "or send a prompt that you wrote yourself to /v1/completions or /generate"
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The input of a chat template. Each of ``messages`` has a ``role`` and a ``content``, which is text.

    ``options`` are further variables of the template, which may not read all of them. With ``continued``, the model
    continues the last message instead of answering it. ``generation_prompt`` asks the template to open the assistant's
    turn. ``thought``: how the reply thinks; None if the model does not think. ``media``: pictures and sounds, by the
    marks that stand for them in the messages.
    """

    messages: Sequence[Json]
    tools: Sequence[Json] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    generation_prompt: bool = True
    thought: ThoughtPlan | None = None
    media: Mapping[str, Media] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt as the template rendered it, but for its ``media``, and its tokens, cells of media included.

    ``ignored_options``: those that the template does not read.
    """

    text: str
    tokens: TokenizedText
    media: PromptMedia | None = None
    ignored_options: tuple[str, ...] = ()


class TooManyControlTextsError(Exception):
    """The messages contain more control texts than the server tokenizes separately."""

    def __init__(self, limit: int, given: int) -> None:
        super().__init__(limit, given)
        self.limit = limit
        self.given = given


MAX_CONTROL_TEXTS = 256


def template_of(model: ModelFacts, *, tools: bool) -> str:
    """Return the source of the model's chat template. Raises TemplateError if it has none."""
    source = (model.tool_template if tools else "") or model.chat_template
    if not source:
        raise TemplateError(_NO_TEMPLATE)
    return source


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A conversation as its template rendered it, in ``parts`` that are tokenized separately."""

    parts: Sequence[str]
    add_special: bool
    ignored_options: tuple[str, ...]


async def prompt_of(
    engine: TextEngine, renderer: TemplateRenderer, model: ModelFacts, conversation: Conversation, max_bytes: int
) -> ChatPrompt:
    """Render and tokenize ``conversation``; the rendered text must have at most ``max_bytes`` bytes.

    Raises TemplateError, TooManyControlTextsError, NoShardError, TextTooLongError.
    """
    return await _tokenized(engine, conversation, await _rendered(engine, renderer, model, conversation, max_bytes))


async def prompt_up_to(
    engine: TextEngine,
    renderer: TemplateRenderer,
    model: ModelFacts,
    conversation: Conversation,
    cut: tuple[str, int],
) -> tuple[ChatPrompt, str]:
    """Return the prompt before a mark in the last message, and the text that the template wrote after it.

    ``cut``: the mark, and the maximum number of bytes of the rendered text. Raises what `prompt_of` raises.
    """
    mark, max_bytes = cut
    whole = await _rendered(engine, renderer, model, conversation, max_bytes)
    *before, last = whole.parts
    head, found, tail = last.partition(mark)
    if not found or mark in tail or any(mark in part for part in before):
        raise TemplateError("it does not show the last message as it is, once and at the end")
    prompt = await _tokenized(engine, conversation, replace(whole, parts=[*before, head]))
    return prompt, tail


async def _rendered(
    engine: TextEngine, renderer: TemplateRenderer, model: ModelFacts, conversation: Conversation, max_bytes: int
) -> _Rendered:
    source = template_of(model, tools=bool(conversation.tools))
    messages, tools = list(conversation.messages), conversation.tools
    read = await renderer.names(source) if conversation.options else frozenset[str]()
    options = {key: value for key, value in conversation.options.items() if key in read}
    marks = await marks_for(engine, [*strings_of(messages), *strings_of(list(tools or [])), *strings_of(options)])
    messages = marks.put_into(messages)
    if any(message.get("tool_calls") for message in messages):
        messages = (await renderer.call_forms.of(source)).of(messages)
    end = ""
    if conversation.continued:
        end = draw_mark()
        messages = [*messages[:-1], messages[-1] | {"content": (messages[-1]["content"] or "") + end}]
    text = await renderer.render(
        source,
        {
            "documents": None,
            # As in llama.cpp: a template that knows the switch lets the model think unless the request says otherwise.
            "enable_thinking": True,
            **marks.put_into(options),
            "messages": await renderer.content_forms.of(source, messages),
            "tools": marks.put_into(list(tools)) if tools else None,
            "bos_token": model.bos_text,
            "eos_token": model.eos_text,
            "add_generation_prompt": conversation.generation_prompt and not conversation.continued,
        },
        max_bytes,
    )
    if end:
        text, found, _ = text.rpartition(end)
        if not found:
            raise TemplateError("it does not show the last message as it is, so that it cannot be continued")
    elif conversation.thought is not None and conversation.generation_prompt:
        text += conversation.thought.prompt_end(text, source)
    ignored = tuple(sorted(conversation.options.keys() - read))
    parts = marks.split(text)
    if len(parts) - 1 > MAX_CONTROL_TEXTS:
        raise TooManyControlTextsError(MAX_CONTROL_TEXTS, len(parts) - 1)
    # If the template writes the begin token itself, the tokenizer must not add another.
    return _Rendered(parts, not (model.bos_text and text.startswith(model.bos_text)), ignored)


async def _tokenized(engine: TextEngine, conversation: Conversation, rendered: _Rendered) -> ChatPrompt:
    parts, add_special, ignored = rendered.parts, rendered.add_special, rendered.ignored_options
    if conversation.media:
        mixed = with_media(parts, conversation.media)
        whole = await engine.queries.tokenize_parts(mixed, add_special=add_special)
        return ChatPrompt("".join(part for part in mixed if isinstance(part, str)), whole.tokens, whole.media, ignored)
    tokenized = await asyncio.gather(
        *(
            engine.queries.tokenize(part, add_special=add_special and number == 0)
            for number, part in enumerate(parts)
            if part or number == 0
        )
    )
    return ChatPrompt("".join(parts), _joined(tokenized), ignored_options=ignored)


def _joined(parts: Sequence[TokenizedText]) -> TokenizedText:
    if len(parts) == 1:
        return parts[0]
    return TokenizedText(
        tuple(token_id for part in parts for token_id in part.token_ids),
        tuple(piece for part in parts for piece in part.pieces),
        tuple(special for part in parts for special in part.specials),
    )
