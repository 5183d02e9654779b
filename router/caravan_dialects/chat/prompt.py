"""Turns a conversation into the tokens of a prompt, and reuses those of earlier turns.

A tokenizer may split a text otherwise than the model generated it. The tokens of the next prompt would then differ from
those in the cache, from the first such place on: what a model generated is therefore never tokenized again.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from caravan_dialects.chat.control_text import draw_mark, marks_for, strings_of, with_media
from caravan_dialects.chat.template_messages import TemplateError
from caravan_dialects.chat.template_renderer import TemplateRenderer
from caravan_dialects.chat.thought_format import ThoughtPlan
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.engine import ModelFacts, TextEngine
from caravan_scheduler.core.media import Media
from caravan_scheduler.core.prompt_media import PromptMedia, is_cell, text_ids
from caravan_scheduler.core.tokens import common_length

_NO_TEMPLATE = (
    "the model has no chat template: serve a GGUF file with `tokenizer.chat_template`, "
    "or send a prompt that you wrote yourself to /v1/completions or /generate"
)
Json = dict[str, Any]
MAX_CONTROL_TEXTS = 256


async def with_exact_tokens(engine: TextEngine, exact: tuple[int, ...], rendered: TokenizedText) -> tuple[int, ...]:
    """Return the tokens of ``rendered`` with those of ``exact`` in their place, as far as both stand for the same text.

    ``exact`` may be any ids, also a client's: control tokens, and cells of media, count as the same only where
    ``rendered`` has them too. Raises NoShardError.
    """
    same = common_length(exact, rendered.token_ids)
    # The rest of `exact` may be another text, of any length.
    rest = exact[same : same + 2 * (len(rendered.token_ids) - same)]
    size = engine.model.vocabulary_size
    if not rest or not all(0 <= token_id < size or is_cell(token_id) for token_id in rest):
        return rendered.token_ids
    earlier = _Reader(await _detokenized(engine, rest), 0)
    later = _Reader(rendered, same)
    while earlier.more and later.more:
        if not earlier.read_like(later):
            break
    return (*exact[:same], *rest[: earlier.agreed], *rendered.token_ids[later.agreed :])


async def _detokenized(engine: TextEngine, token_ids: tuple[int, ...]) -> TokenizedText:
    """Return the pieces of ``token_ids``; cells of media have none, and count as control tokens."""
    text = tuple(text_ids(token_ids))
    found = await engine.queries.detokenize(text)
    if len(text) == len(token_ids):
        return found
    tokens = zip(found.pieces, found.specials, strict=True)
    columns = [(b"", True) if is_cell(token_id) else next(tokens) for token_id in token_ids]
    return TokenizedText(token_ids, tuple(piece for piece, _ in columns), tuple(special for _, special in columns))


@dataclass(slots=True)
class _Reader:
    """Reads tokens of a text. The first ``agreed`` tokens stand for the same text as those of another reader."""

    text: TokenizedText
    agreed: int

    @property
    def more(self) -> bool:
        return self.agreed < len(self.text.token_ids)

    def read_like(self, other: "_Reader") -> bool:
        """Read the next tokens of both up to a place where tokens of both end; return False if the texts differ."""
        own, others = self.agreed, other.agreed
        if self.text.specials[own] or other.text.specials[others]:
            if self.text.token_ids[own] != other.text.token_ids[others]:
                return False
            self.agreed, other.agreed = own + 1, others + 1
            return True
        mine, theirs = self.text.pieces[own], other.text.pieces[others]
        own, others = own + 1, others + 1
        while mine != theirs:
            if theirs.startswith(mine) and own < len(self.text.pieces) and not self.text.specials[own]:
                mine, theirs = self.text.pieces[own], theirs[len(mine) :]
                own += 1
            elif mine.startswith(theirs) and others < len(other.text.pieces) and not other.text.specials[others]:
                mine, theirs = mine[len(theirs) :], other.text.pieces[others]
                others += 1
            else:
                return False
        self.agreed, other.agreed = own, others
        return True


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
