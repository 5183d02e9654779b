"""A conversation with a model of this process, which keeps the messages and the exact tokens of its turns."""

import copy
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

from caravan.calls import Model
from caravan.errors import ReplyUnderWay, RequestError, StateError
from caravan.model_calls import ModelCalls
from caravan.outputs import ChatPart, ChatReply, CompletionOutput, RequestOutput
from caravan.prompts import CHAT_PARAMS, ChatCall, Message, SessionOptions, TurnOptions, chat_fields_of, params_or
from caravan.request_fields import portable
from caravan.sampling_params import SamplingParams
from caravan.twins import Twin, blocking, iterated, plain

# The user's text, or messages, such as results of calls.
Given = str | Sequence[Message]

_FORMAT = {"format": "caravan chat session", "version": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """All that a session keeps.

    ``token_ids``: those of the last prompt and reply, for the model of ``fingerprint``; () and "" before the first
    reply. ``kept_from``: the place of the first message that the last prompt had, if it left out turns; else 0.
    ``settings``: what every turn has, by the names of `LLM.chat`.
    """

    messages: tuple[Message, ...]
    settings: Mapping[str, Any]
    adapter: str
    token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    kept_from: int = 0

    def rewound(self, turns: int) -> Self:
        """Return the session without the last ``turns``. Raises RequestError if it has fewer."""
        starts = [number for number, message in enumerate(self.messages) if message.get("role") == "user"]
        if not 1 <= turns <= len(starts):
            raise RequestError(f"`turns` must be >= 1 and <= {len(starts)}. Given: {turns}")
        return replace(self, messages=self.messages[: starts[-turns]], kept_from=0)

    def encoded(self) -> bytes:
        """Return it as JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(_FORMAT | fields, ensure_ascii=False).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        """Return what `encoded` returned. Raises StateError."""
        try:
            found = json.loads(data)
        except ValueError:
            raise StateError("this is no JSON") from None
        if not isinstance(found, dict) or any(found.get(name) != value for name, value in _FORMAT.items()):
            raise StateError("this is no saved chat session of this version")
        # Earlier versions left out no turns.
        fields = {"kept_from": 0} | {name: found.get(name) for name in cls.__dataclass_fields__ if name in found}
        if missing := sorted(cls.__dataclass_fields__.keys() - fields.keys()):
            raise StateError(f"the saved session lacks {', '.join(missing)}")
        messages, token_ids, settings = fields["messages"], fields["token_ids"], fields["settings"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise StateError("`messages` must be a list of objects")
        if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
            raise StateError("`token_ids` must be a list of whole numbers")
        if not isinstance(settings, dict) or not isinstance(fields["adapter"], str):
            raise StateError("`settings` must be an object, and `adapter` a text")
        if type(fields["kept_from"]) is not int or fields["kept_from"] < 0:
            raise StateError("`kept_from` must be a whole number >= 0")
        return cls(**fields | {"messages": tuple(messages), "token_ids": tuple(token_ids)})


def new_session(messages: Sequence[Message], options: SessionOptions) -> SavedSession:
    """Return a session that begins with ``messages``, after a system message if there is one. Raises TypeError."""
    settings = copy.deepcopy(chat_fields_of(options, SessionOptions))
    first = [{"role": "system", "content": options["system"]}] if options.get("system") else []
    begun = copy.deepcopy((*first, *portable(messages)))
    return SavedSession(messages=begun, settings=settings, adapter=options.get("adapter", ""))


def read_session(saved: str | Path | bytes) -> SavedSession:
    """Read what `ChatSession.save` returned or wrote. Raises StateError, OSError."""
    return SavedSession.decoded(saved if isinstance(saved, bytes) else Path(saved).read_bytes())


class AsyncChatSession:
    """`ChatSession` for asyncio, over an `AsyncLLM`: the same calls with the same meaning."""

    def __init__(self, llm: ModelCalls, state: SavedSession) -> None:
        """Use `AsyncLLM.chat_session`."""
        self._llm = llm
        self._state = state
        # The turn that is being answered.
        self._current: _Turn | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._state.messages)} messages>"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, the oldest first, in the form of `LLM.chat`."""
        return [dict(message) for message in copy.deepcopy(self._state.messages)]

    def rewind(self, turns: int = 1) -> None:
        """Take back the last ``turns``; a turn begins with a user's message.

        Raises RequestError if there are fewer, ReplyUnderWay.
        """
        self._check()
        self._state = self._state.rewound(turns)

    def save(self, path: str | Path | None = None) -> bytes:
        """Return the session as JSON, and write it to ``path`` if it is given."""
        data = self._state.encoded()
        if path is not None:
            Path(path).write_bytes(data)
        return data

    def fork(self) -> "AsyncChatSession":
        """Return a new session with the same messages. Nothing is computed."""
        return AsyncChatSession(self._llm, self._state)

    async def respond(
        self, given: Given, sampling_params: SamplingParams | None = None, **options: Unpack[TurnOptions]
    ) -> ChatReply:
        """Answer ``given``, a text or messages, and add both to the session.

        ``tool_choice``, ``schema``: see `LLM.chat`. Raises what `LLM.chat` raises, and ReplyUnderWay.
        """
        return await self._llm._run(self._reply(self._llm._use().local, given, sampling_params, options))

    def stream(
        self, given: Given, sampling_params: SamplingParams | None = None, **options: Unpack[TurnOptions]
    ) -> AsyncGenerator[ChatPart, None]:
        """Yield the parts of what `respond` returns as they come; the last one has the whole reply.

        Closing the iterator before that ends the reply, which the session then does not get.
        """
        return self._llm._iterate(self._parts(self._llm._use().local, given, sampling_params, options))

    def _check(self) -> None:
        if self._current is not None:
            raise ReplyUnderWay("the session is still being answered")

    @contextmanager
    def _turn(self, given: Given, params: SamplingParams | None) -> "Iterator[_Turn]":
        """Begin a turn on the model's event loop. `_Turn.end` makes it one of the session."""
        self._check()
        params = params_or(params, CHAT_PARAMS)
        if params.n != 1 or params.logprobs is not None:
            raise RequestError("a session has one reply without log probabilities: `n` must be 1, and `logprobs` None")
        new = [{"role": "user", "content": given}] if isinstance(given, str) else copy.deepcopy(portable(given))
        if not new or new[-1].get("role") == "assistant":
            raise RequestError("there must be a message to answer, which is not the assistant's")
        self._current = turn = _Turn(self, (*self._state.messages, *new), params)
        try:
            yield turn
        finally:
            # The session may have the next turn already.
            if self._current is turn:
                self._current = None

    async def _parts(
        self, local: Model, given: Given, params: SamplingParams | None, options: TurnOptions
    ) -> AsyncGenerator[ChatPart, None]:
        with self._turn(given, params) as turn:
            reply = ChatReply()
            stream = local.stream_chat(turn.messages, turn.params, turn.call(options))
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    reply = _extended(reply, output)
                    (part,) = output.outputs
                    if output.finished:
                        turn.end(output, reply)
                    yield ChatPart(text=part.text, reasoning=part.reasoning, reply=reply if output.finished else None)

    async def _reply(
        self, local: Model, given: Given, params: SamplingParams | None, options: TurnOptions
    ) -> ChatReply:
        with self._turn(given, params) as turn:
            call = turn.call(options)
            (output,) = await local.chat([turn.messages], [turn.params], call, lambda _output: None)
            reply = _extended(ChatReply(), output)
            turn.end(output, reply)
            return reply


class _Turn:
    """A turn that is not yet one of its session."""

    def __init__(self, session: AsyncChatSession, messages: tuple[Message, ...], params: SamplingParams) -> None:
        self._session = session
        self._before = session._state
        self._fingerprint = session._llm._use().local.fingerprint
        self.messages = messages
        self.params = params

    def call(self, options: TurnOptions) -> ChatCall:
        """Return what the turn has beside messages and sampling parameters. Raises TypeError."""
        before, choices = self._before, chat_fields_of(options, TurnOptions)
        fields = {**before.settings, **{name: value for name, value in choices.items() if value is not None}}
        exact = before.token_ids if before.fingerprint == self._fingerprint else ()
        return ChatCall(fields, before.adapter, exact, before.kept_from)

    def end(self, output: RequestOutput, reply: ChatReply) -> None:
        """Add the turn to its session, which others may then continue."""
        self._session._state = replace(
            self._before,
            messages=(*self.messages, _message(reply)),
            token_ids=(*output.prompt_token_ids, *reply.token_ids),
            fingerprint=self._fingerprint,
            kept_from=reply.left_out[-1] + 1 if reply.left_out else 0,
        )
        self._session._current = None


def _extended(reply: ChatReply, output: RequestOutput) -> ChatReply:
    part: CompletionOutput = output.outputs[0]
    return ChatReply(
        text=reply.text + part.text,
        reasoning=reply.reasoning + part.reasoning,
        tool_calls=part.tool_calls,
        finish_reason=part.finish_reason or "",
        token_ids=(*reply.token_ids, *part.token_ids),
        prompt_tokens=output.num_prompt_tokens,
        cached_tokens=output.num_cached_tokens,
        left_out=output.left_out,
    )


def _message(reply: ChatReply) -> dict[str, Any]:
    """Return the reply as a message of later turns."""
    message: dict[str, Any] = {"role": "assistant"}
    if reply.text or not reply.tool_calls:
        message["content"] = reply.text
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


class ChatSession(Twin[AsyncChatSession]):
    """A conversation with an `LLM`, which keeps its messages, and the exact tokens of the last prompt and reply.

    The next turn begins with these tokens as far as the template renders their text, so that only new tokens are
    computed, also where the tokenizer would split a reply otherwise. `LLM.chat_session` makes it.

    A reply that is left, fails or is interrupted leaves the session as it was. While one is under way, further calls
    raise ReplyUnderWay.
    """

    def __init__(self, llm: Twin[ModelCalls], state: SavedSession) -> None:
        """Use `LLM.chat_session`."""
        super().__init__(AsyncChatSession(llm._awaited, state), llm._loop)
        # A session keeps its model open.
        self._llm = llm

    def __repr__(self) -> str:
        return repr(self._awaited).replace("Async", "", 1)

    respond = blocking(AsyncChatSession.respond)
    stream = iterated(AsyncChatSession.stream)
    rewind = plain(AsyncChatSession.rewind)
    save = plain(AsyncChatSession.save)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, the oldest first, in the form of `LLM.chat`."""
        return self._awaited.messages

    def fork(self) -> "ChatSession":
        """Return a new session with the same messages. Nothing is computed."""
        return ChatSession(self._llm, self._awaited._state)
