"""Turns messages into the tokens of an executor's conversations, as `LLM.chat` does."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from caravan.background import BackgroundLoop
from caravan.executor_sampling import LIMITS, model_facts
from caravan.prompts import CHAT_PARAMS, ChatCall, Messages
from caravan.request_bodies import chat_body
from caravan.valid_requests import named_errors
from caravan_dialects.api.limits import Bounds, Limits, bounds_of
from caravan_dialects.api.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.chat.truncation import Room, Turns, shortened
from caravan_dialects.chat.prompt import with_exact_tokens
from caravan_dialects.chat.template_renderer import TemplateRenderer
from caravan_dialects.media.decoder import MediaDecoder
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.errors import TextTooLongError
from caravan_scheduler.core.media import MediaPrompt
from caravan_scheduler.core.prompt_media import MediaTokens
from caravan_shard.backends.base import Backend, Vocabulary


class ChatPrompts:
    """Renders messages on its own event loop, which has the renderer's processes; `close` ends them.

    Any thread may call it, one at a time.
    """

    def __init__(self, backend: Backend, max_tokenize_bytes: int) -> None:
        """``max_tokenize_bytes``: maximum bytes of a text to tokenize."""
        model = model_facts(backend, max_tokenize_bytes=max_tokenize_bytes)
        self._context = _Context(
            limits=LIMITS,
            templates=TemplateRenderer(),
            decoding=MediaDecoder(),
            model=model,
            bounds=bounds_of(LIMITS, model),
            engine=_Texts(backend.vocabulary, model),
        )
        self._loop = BackgroundLoop("executor")

    def tokens(self, messages: Messages, call: ChatCall) -> tuple[list[int], list[int]]:
        """Return the prompt of ``messages``, and the places of the messages that it leaves out.

        It begins with ``call.exact`` as far as these tokens stand for its text. Raises RequestError.
        """
        tokens, left_out = self._loop.run(self._tokens(messages, call))
        return list(tokens), left_out

    async def _tokens(self, messages: Messages, call: ChatCall) -> tuple[tuple[int, ...], list[int]]:
        with named_errors():
            body = chat_body(messages, CHAT_PARAMS, call.fields)
            if body.truncation != "auto":
                return await self._prompt(body, call.exact or ()), []
            turns = Turns.of(body.messages)

            async def attempt(gone: int) -> tuple[int, ...]:
                shorter = msgspec.structs.replace(body, messages=turns.without(gone))
                return await self._prompt(shorter, call.exact or ())

            room = Room(total=self._context.bounds.max_total_tokens, new=None)
            gone, tokens = await shortened(attempt, len, turns.most, room, turns.before(call.before))
            return tokens, turns.left_out(gone)

    async def _prompt(self, body: ChatRequest, exact: tuple[int, ...]) -> tuple[int, ...]:
        prompt = await chat_prompt_of(self._context, chat_plan_of(self._context, body, constrained=False))
        return await with_exact_tokens(self._context.engine, exact, prompt.tokens)

    def close(self) -> None:
        """End the loop and its processes. Closing it again does nothing."""
        self._loop.close(self._context.close)


class _Texts:
    """The model as far as its texts go: a `TextEngine`, and its `TextQueries`."""

    def __init__(self, vocabulary: Vocabulary, model: ModelFacts) -> None:
        self._vocabulary = vocabulary
        self.model = model

    @property
    def queries(self) -> "_Texts":
        return self

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> TokenizedText:
        size, limit = len(text.encode()), self.model.max_tokenize_bytes
        if size > limit:
            raise TextTooLongError(f"text must have <= {limit} bytes. Given: {size}")
        return await self.detokenize(
            self._vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)
        )

    async def tokenize_parts(
        self, parts: MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> MediaTokens:
        raise NotImplementedError("the messages of an executor are text: its model's facts name no media")

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        pieces = [self._vocabulary.piece(token) for token in token_ids]
        return TokenizedText(
            tuple(token_ids), tuple(piece.data for piece in pieces), tuple(piece.special for piece in pieces)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """A `PromptContext`."""

    limits: Limits
    templates: TemplateRenderer
    decoding: MediaDecoder
    model: ModelFacts
    bounds: Bounds
    engine: _Texts

    async def close(self) -> None:
        await self.templates.close()
        await self.decoding.close()
