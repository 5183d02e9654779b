"""What calls that answer conversations take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from caravan.options import check_names
from caravan.sampling_params import SamplingParams

# A message in OpenAI's form.
Message = Mapping[str, Any]
Messages = Sequence[Message]

# As many tokens as fit.
CHAT_PARAMS = SamplingParams(max_tokens=None)


class PromptOptions(TypedDict, total=False):
    """What the chat template is given beside messages: see `caravan.LLM.chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class TurnOptions(TypedDict, total=False):
    """What one answer must be: see `caravan.LLM.chat`."""

    tool_choice: str | Mapping[str, Any] | None
    schema: Any


class SessionOptions(PromptOptions, total=False):
    """Options of a session: see `caravan.LLM.chat_session`."""

    system: str
    adapter: str


class ChatOptions(PromptOptions, TurnOptions, total=False):
    """Options of a chat that are no sampling parameters: see `caravan.LLM.chat`."""

    adapter: str


@dataclass(frozen=True, slots=True)
class ChatCall:
    """What a chat has beside messages and sampling parameters.

    ``fields``: those of a chat request. ``adapter``: "" for none. ``exact``: None, or the tokens of the earlier turns
    of a session, where a number of new tokens that does not fit counts as all that fit.
    """

    fields: Mapping[str, Any]
    adapter: str = ""
    exact: tuple[int, ...] | None = None


def split_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return the conversations: ``messages`` may be one, or a list of them."""
    if messages and not isinstance(messages[0], Mapping):
        return list(messages)  # type: ignore[arg-type]
    return [messages]  # type: ignore[list-item]


def chat_fields_of(options: Mapping[str, Any], known: type) -> dict[str, Any]:
    """Return the fields of a chat request that ``options`` are. Raises TypeError for one that is not ``known``."""
    check_names(options, known)
    tools: Sequence[Any] | None = options.get("tools")
    schema: Any = options.get("schema")
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return {
        "tools": None if tools is None else list(tools),
        "tool_choice": options.get("tool_choice"),
        "json_schema": schema,
        "chat_template_kwargs": options.get("chat_template_kwargs"),
    }
