"""Makes a chat of a response's request, and leaves out its oldest turns if they do not fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from caravan_router.chat.thought_format import thought_format_of
from caravan_router.conversations.nodes import Json
from caravan_router.core.errors import TextTooLongError
from caravan_router.http.generation.checks import check_positive
from caravan_router.http.generation.context import Context
from caravan_router.http.generation.rules import (
    EmptyPromptError,
    PromptTooLongError,
    TooManyBytesError,
    UnsupportedFieldError,
)
from caravan_router.http.generation.schema import Format, JsonSchemaFormat, NamedSchema
from caravan_router.http.openai.chat.messages import check_depth
from caravan_router.http.openai.chat.schema import ChatRequest
from caravan_router.http.openai.chat.validation import ChatSource, ValidChat, validate_chat
from caravan_router.http.openai.responses.item_messages import count_system, messages_of, turns_of
from caravan_router.http.openai.responses.rules import MetadataError
from caravan_router.http.openai.responses.schema import InputFields, NamedSchemaFormat, ResponseRequest, Truncated
from caravan_router.http.openai.responses.tools import OfferedTools, chosen_tools
from caravan_router.http.openai.responses.turn import Turn
from caravan_router.http.openai.schema import SamplingFields
from caravan_router.http.server.errors import ContextLengthError

_MAX_KEYS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
# When turns are left out, so many are that this part of the context is taken: the next turns then fit beside the rest,
# whose cache stays of use.
_KEPT = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidTurn:
    """``truncated``: what the prompt leaves out; None if nothing."""

    chat: ValidChat
    truncated: Truncated | None


class _Stored(msgspec.Struct, frozen=True):
    """The part of an earlier response that a later turn reads."""

    truncated: Truncated | None = None


def check_request(body: ResponseRequest) -> None:
    """Refuse what would change the meaning of the request and is not supported. Raises ValidationError."""
    if body.background:
        raise UnsupportedFieldError("background", "set it to false", True)
    if body.prompt is not None:
        raise UnsupportedFieldError("prompt", "send `instructions` and `input`", body.prompt)
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        raise UnsupportedFieldError("top_logprobs", "set it to 0", body.top_logprobs)
    check_positive("max_output_tokens", body.max_output_tokens)
    check_metadata(body.metadata)
    # The reply shows it.
    check_depth("tool_choice", body.tool_choice)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises MetadataError."""
    given = metadata or {}
    if len(given) > _MAX_KEYS or any(len(key) > _MAX_KEY or len(text) > _MAX_VALUE for key, text in given.items()):
        raise MetadataError


async def validate_turn(context: Context, body: InputFields, turn: Turn, offered: OfferedTools) -> ValidTurn:
    """Raises ValidationError, ContextLengthError, ToolError, ChatTemplateError, NoShardError."""
    items = [*turn.chain.items, *turn.items]
    if not items and body.instructions is None:
        raise EmptyPromptError("input")
    attempts = _Attempts(context, body, turn, offered, items)
    if body.truncation != "auto":
        return ValidTurn(chat=await attempts.whole(0), truncated=None)
    dropped, chat = await attempts.shortened(_turns_dropped_before(turn))
    truncated = Truncated(dropped, [item["id"] for item in attempts.dropped(dropped)]) if dropped else None
    return ValidTurn(chat=chat, truncated=truncated)


def _turns_dropped_before(turn: Turn) -> int:
    """Return how many turns the response before left out: this one begins like it, so that the cache is of use."""
    response = turn.chain.nodes[-1].response if turn.chain.nodes else b""
    before = msgspec.json.decode(response, type=_Stored).truncated if response else None
    return 0 if before is None else before.turns


class _Attempts:
    """Validates a request with fewer and fewer turns. The system messages at the start and the last turn stay."""

    def __init__(
        self, context: Context, body: InputFields, turn: Turn, offered: OfferedTools, items: Sequence[Json]
    ) -> None:
        self._context = context
        self._body = body
        self._offered = offered
        self._items = items
        self._system = count_system(items)
        self._starts = turns_of(items)
        model = context.model
        template = (model.tool_template if offered.tools else "") or model.chat_template
        self._thinks = thought_format_of(template) is not None
        tokens = turn.chain.tokens
        self._known = () if tokens is None or tokens.fingerprint != model.fingerprint else tokens.token_ids

    def dropped(self, turns: int) -> Sequence[Json]:
        """Return the items of the first ``turns`` turns."""
        return self._items[self._system : self._starts[turns]] if turns else ()

    async def whole(self, turns: int) -> ValidChat:
        """Validate without the first ``turns`` turns. Raises ContextLengthError if that is too long."""
        kept = [*self._items[: self._system], *self._items[self._system + len(self.dropped(turns)) :]]
        body = chat_request(self._body, kept, self._offered, thinks=self._thinks)
        source = ChatSource(body=body, names=("input", "max_output_tokens"), exact=self._known, clamps=True)
        try:
            return await validate_chat(self._context, source, 1)
        except (PromptTooLongError, TextTooLongError) as error:
            raise ContextLengthError(str(error)) from error
        except TooManyBytesError as error:
            if error.field != "messages":
                raise
            raise ContextLengthError(str(error)) from error

    async def shortened(self, before: int) -> tuple[int, ValidChat]:
        """Return the number of turns to leave out, ``before`` if that fits, and the request without them."""
        total = self._context.bounds.max_total_tokens
        asked = self._body.max_output_tokens if isinstance(self._body, ResponseRequest) else None
        room = min(asked or 1, total // 2)
        last = max(0, len(self._starts) - 1)
        first = min(before, last)
        chat = await self._within(first, total - room)
        if chat is not None:
            return first, chat
        fewest, most = first + 1, last
        best = None
        while fewest <= most:
            middle = (fewest + most) // 2
            chat = await self._within(middle, min(total - room, int(total * _KEPT)))
            if chat is None:
                fewest = middle + 1
            else:
                best, most = (middle, chat), middle - 1
        return best or (last, await self.whole(last))

    async def _within(self, turns: int, tokens: int) -> ValidChat | None:
        try:
            chat = await self.whole(turns)
        except ContextLengthError:
            return None
        return chat if len(chat.request.prompt) <= tokens else None


def chat_request(body: InputFields, items: Sequence[Json], offered: OfferedTools, *, thinks: bool) -> ChatRequest:
    """Return the chat request with the same meaning, for a model that ``thinks`` or not. Raises ValidationError."""
    tools, choice = chosen_tools(offered.tools, body.tool_choice)
    sampling = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    serving = ("max_output_tokens", "priority", "timeout", "cache_salt", "speculate")
    limit, priority, timeout, salt, speculate = (getattr(body, name, None) for name in serving)
    return ChatRequest(
        messages=messages_of(body.instructions, items),
        tools=list(tools) or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        max_tokens=limit,
        response_format=_format(body),
        # Agents send it to every model.
        reasoning_effort=body.reasoning.effort if thinks and body.reasoning is not None else None,
        reasoning_budget_tokens=body.reasoning_budget_tokens,
        continue_final_message=False,
        model=body.model,
        priority=priority,
        timeout=timeout,
        cache_salt=salt,
        speculate=speculate,
        **sampling,
    )


def _format(body: InputFields) -> Format | None:
    asked = None if body.text is None else body.text.format
    if isinstance(asked, NamedSchemaFormat):
        return JsonSchemaFormat(json_schema=NamedSchema(schema=asked.schema, name=asked.name))
    return asked
