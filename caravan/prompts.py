"""The forms in which prompts and conversations may be given, and the options of calls that answer conversations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union

from caravan.errors import RequestError
from caravan.options import check_names
from caravan.sampling_params import SamplingParams

if TYPE_CHECKING:
    from caravan_scheduler.core.media import Embeddings


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings: an array [tokens, size] of floats, or `caravan.Embeddings`."""

    prompt_embeds: Any


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt
Prompts = Prompt | Sequence[Prompt]

# A prompt as its text, its token ids or its embeddings.
PlainPrompt = Union[str, tuple[int, ...], "Embeddings"]


def plain_prompts(prompts: Prompts | Any) -> list[PlainPrompt]:
    """Return one entry for each prompt. Raises RequestError."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable) or _is_token_ids(prompts):
        return [_plain(prompts)]
    return [_plain(prompt) for prompt in prompts]


def check_text(text: Any) -> None:
    """Raise RequestError if ``text`` is none."""
    if not isinstance(text, str):
        raise RequestError(f"a text must be a str. Given: {text!r:.80}")


def token_ids_of(given: Any) -> tuple[int, ...]:
    """Return token ids, of which there may be none. Raises RequestError."""
    try:
        return tuple(map(index, given))
    except TypeError:
        raise RequestError(f"token ids must be a list of whole numbers. Given: {given!r:.80}") from None


def plain_prompt(prompt: Prompt) -> PlainPrompt:
    """Return the prompt. Raises RequestError, also for several."""
    prompts = plain_prompts(prompt)
    if len(prompts) != 1:
        raise RequestError(f"there must be one prompt here. Given: {len(prompts)}")
    return prompts[0]


def _plain(prompt: Any) -> PlainPrompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        if (rows := prompt.get("prompt_embeds")) is not None:
            return _embeddings(rows)
        if isinstance(text := prompt.get("prompt"), str):
            return text
        prompt = prompt.get("prompt_token_ids")
    if _is_token_ids(prompt):
        return tuple(map(int, prompt))
    raise RequestError(f"a prompt is a text, a list of token ids, or an object with one of them. Given: {prompt!r:.80}")


def _embeddings(rows: Any) -> "Embeddings":
    # Imported here: only they need it.
    from caravan.prompt_rows import embeddings_of_rows

    return embeddings_of_rows(rows)


def _is_token_ids(prompt: Any) -> bool:
    # Entries may be integers of numpy.
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(hasattr(entry, "__index__") for entry in prompt)


# A message in OpenAI's form.
Message = Mapping[str, Any]
Messages = Sequence[Message]

# As many tokens as fit.
CHAT_PARAMS = SamplingParams(max_tokens=None)


def params_or(params: SamplingParams | None, otherwise: SamplingParams | None = None) -> SamplingParams:
    """Return ``params``, or ``otherwise`` for None, whose default are the defaults. Raises RequestError."""
    if params is None:
        return otherwise or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params must be SamplingParams. Given: {params!r:.80}")
    return params


def check_messages(messages: Any) -> None:
    """Raise RequestError if ``messages`` is no list of messages."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(
            f'messages are a list such as [{{"role": "user", "content": "Hi"}}]. Given: {messages!r:.80}'
        )
    for message in messages:
        if not isinstance(message, Mapping):
            raise RequestError(
                f'a message is an object such as {{"role": "user", "content": "Hi"}}. Given: {message!r:.80}'
            )


class PromptOptions(TypedDict, total=False):
    """What the chat template is given beside messages: see `caravan.LLM.chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class MessagesOptions(PromptOptions, total=False):
    """Options of `caravan.Conversation.prompt_messages`; they mean what those of `caravan.LLM.chat` mean."""

    truncation: Literal["auto", "disabled"] | None


class TurnOptions(TypedDict, total=False):
    """What one answer must be: see `caravan.LLM.chat`."""

    truncation: Literal["auto", "disabled"] | None
    tool_choice: str | Mapping[str, Any] | None
    schema: Any


class SessionOptions(PromptOptions, total=False):
    """Options of a session: see `caravan.LLM.chat_session`."""

    system: str
    adapter: str
    truncation: Literal["auto", "disabled"] | None


class ChatOptions(PromptOptions, TurnOptions, total=False):
    """Options of a chat that are no sampling parameters: see `caravan.LLM.chat`."""

    adapter: str


@dataclass(frozen=True, slots=True)
class ChatCall:
    """What a chat has beside messages and sampling parameters.

    ``fields``: those of a chat request. ``adapter``: "" for none. ``exact``: None, or the tokens of the earlier turns
    of a session, where a number of new tokens that does not fit counts as all that fit. ``before``: the place of the
    first message that an earlier prompt of a session kept, if turns are left out.
    """

    fields: Mapping[str, Any]
    adapter: str = ""
    exact: tuple[int, ...] | None = None
    before: int = 0


def split_conversations(messages: Any) -> list[Messages]:
    """Return the conversations: ``messages`` may be one, or a list of them. Raises RequestError."""
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], list | tuple):
        return list(messages)
    check_messages(messages)
    return [messages]


def chat_fields_of(options: Mapping[str, Any], known: type) -> dict[str, Any]:
    """Return the fields of a chat request that ``options`` are.

    Raises TypeError for one that is not ``known``, and RequestError.
    """
    check_names(options, known.__annotations__)
    tools: Sequence[Any] | None = options.get("tools")
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Iterable)):
        raise RequestError(f"tools must be a list of objects. Given: {tools!r:.80}")
    schema: Any = options.get("schema")
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return {
        "tools": None if tools is None else list(tools),
        "tool_choice": options.get("tool_choice"),
        "json_schema": schema,
        "chat_template_kwargs": options.get("chat_template_kwargs"),
        "truncation": options.get("truncation"),
    }
