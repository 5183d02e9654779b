"""Makes a chat of a response's request, and leaves out its oldest turns if they do not fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_dialects.api.generation.checks import check_positive
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.generation.rules import empty_prompt_error, unsupported_field_error
from caravan_dialects.api.generation.schema import Format, JsonSchemaFormat, NamedSchema
from caravan_dialects.api.generation.serving import first_session, serving_fields
from caravan_dialects.api.openai.chat.enforced import SchemaPlaces
from caravan_dialects.api.openai.chat.messages import check_depth
from caravan_dialects.api.openai.chat.schema import ChatRequest, Message
from caravan_dialects.api.openai.chat.truncation import Room, prompt_size, shortened, unsplit
from caravan_dialects.api.openai.chat.validation import ChatSource, ValidChat, validate_whole_chat
from caravan_dialects.api.openai.responses.item_messages import ItemTexts, calls_of, count_system, messages_of, turns_of
from caravan_dialects.api.openai.responses.rules import metadata_error
from caravan_dialects.api.openai.responses.schema import InputFields, NamedSchemaFormat, ResponseRequest, Truncated
from caravan_dialects.api.openai.responses.tools import OfferedTools, chosen_tools
from caravan_dialects.api.openai.responses.turn import Turn, conversation_id
from caravan_dialects.api.openai.schema import SamplingFields
from caravan_dialects.chat.thought_format import thought_format_of
from caravan_dialects.conversations.nodes import Json

_LOGPROBS = "message.output_text.logprobs"
_MAX_KEYS, _MAX_KEY, _MAX_VALUE = 16, 64, 512


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
    if body.prompt is not None:
        raise unsupported_field_error("prompt", "send `instructions` and `input`", body.prompt)
    check_positive("max_output_tokens", body.max_output_tokens)
    check_metadata(body.metadata)
    # The reply shows it.
    check_depth("tool_choice", body.tool_choice)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises ValidationError."""
    given = metadata or {}
    if len(given) > _MAX_KEYS or any(len(key) > _MAX_KEY or len(text) > _MAX_VALUE for key, text in given.items()):
        raise metadata_error()


async def validate_turn(
    context: Context, body: InputFields, turn: Turn, offered: OfferedTools, session: str | None = None
) -> ValidTurn:
    """``session``: what names the session if nothing else does.

    Raises ValidationError, ToolError, ChatTemplateError, NoShardError, TextTooLongError.
    """
    items = turn.all_items
    if not items and body.instructions is None:
        raise empty_prompt_error("input")
    attempts = _Attempts(context, body, turn, offered, _session_of(body, turn) or session)
    if body.truncation != "auto":
        return ValidTurn(chat=await attempts.without(0), truncated=None)
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
        self, context: Context, body: InputFields, turn: Turn, offered: OfferedTools, session: str | None
    ) -> None:
        items = turn.all_items
        self._context = context
        self._body = body
        self._offered = offered
        self._session = session
        self._items = items
        self._fields = {item["id"]: f"input[{number}]" for number, item in enumerate(turn.items)}
        self._system = count_system(items)
        self._starts = unsplit(turns_of(items), calls_of(items))
        model = context.model
        template = (model.tool_template if offered.tools else "") or model.chat_template
        self._thinks = thought_format_of(template) is not None
        tokens = turn.chain.tokens
        self._known = () if tokens is None or tokens.fingerprint != model.fingerprint else tokens.token_ids

    def dropped(self, turns: int) -> Sequence[Json]:
        """Return the items of the first ``turns`` turns."""
        return self._items[self._system : self._starts[turns]] if turns else ()

    async def without(self, turns: int) -> ValidChat:
        """Validate without the first ``turns`` turns."""
        kept = [*self._items[: self._system], *self._items[self._system + len(self.dropped(turns)) :]]
        texts = ItemTexts(MediaParts(self._context.model.media), self._offered, self._fields)
        messages = messages_of(self._body.instructions, kept, texts)
        body = chat_request(self._body, messages, self._offered, thinks=self._thinks, session=self._session)
        names = ("input", "max_output_tokens")
        places = SchemaPlaces(answer="text.format", parameters="parameters", tools=self._offered.places)
        source = ChatSource(body=body, names=names, exact=self._known, clamps=True, media=texts.media, places=places)
        return await validate_whole_chat(self._context, source)

    async def shortened(self, before: int) -> tuple[int, ValidChat]:
        """Return the number of turns to leave out, ``before`` if that fits, and the request without them."""
        asked = self._body.max_output_tokens if isinstance(self._body, ResponseRequest) else None
        room = Room(total=self._context.bounds.max_total_tokens, new=asked)
        return await shortened(self.without, prompt_size, max(0, len(self._starts) - 1), room, before)


def _session_of(body: InputFields, turn: Turn) -> str | None:
    """Return what names the session of a turn: else, the conversation, or the first of the responses it continues."""
    key = body.prompt_cache_key if isinstance(body, ResponseRequest) else None
    options = body.background_options if isinstance(body, ResponseRequest) else None
    job = None if options is None else options.continuation_id
    return first_session(job, key, conversation_id(body), turn.chain.nodes[0].id if turn.chain.nodes else None)


def chat_request(
    body: InputFields, messages: list[Message], offered: OfferedTools, *, thinks: bool, session: str | None
) -> ChatRequest:
    """Return the chat request with the same meaning, for a model that ``thinks`` or not. Raises ValidationError."""
    tools, choice = chosen_tools(offered, body.tool_choice)
    sampling = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    generating = _generating(body) if isinstance(body, ResponseRequest) else {}
    return ChatRequest(
        messages=messages,
        tools=list(tools) or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        # Agents send it to every model.
        reasoning_effort=body.reasoning.effort if thinks and body.reasoning is not None else None,
        reasoning_budget_tokens=body.reasoning_budget_tokens,
        continue_final_message=False,
        model=body.model,
        **serving_fields(body),
        prompt_cache_key=session,
        **generating,
        **sampling,
    )


def generates(body: ResponseRequest) -> bool:
    """Return whether an output is wanted, and not only a prompt in the cache."""
    prewarms = body.prompt_cache_options is not None and body.prompt_cache_options.prewarm
    return body.generate is not False and not prewarms


def wants_logprobs(body: ResponseRequest) -> bool:
    """Return whether the tokens of messages have log probabilities."""
    return bool(body.top_logprobs) or _LOGPROBS in (body.include or ())


def _generating(body: ResponseRequest) -> dict[str, Any]:
    # A step over a prompt always ends with a token, even if none is wanted.
    limit = body.max_output_tokens if generates(body) else 1
    logprobs = wants_logprobs(body)
    return {"max_tokens": limit, "logprobs": logprobs, "top_logprobs": body.top_logprobs if logprobs else None}


def _format(body: InputFields) -> Format | None:
    asked = None if body.text is None else body.text.format
    if isinstance(asked, NamedSchemaFormat):
        return JsonSchemaFormat(json_schema=NamedSchema(schema=asked.schema, name=asked.name))
    return asked
