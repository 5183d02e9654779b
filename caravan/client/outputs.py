"""What a client returns beside the outputs that it shares with `caravan.LLM`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caravan.outputs import ToolCall

# OpenAI's item: a message, a thought, a call of a tool or its output.
Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseUsage:
    """Tokens of a response. ``cached_tokens``: those of the input that were in the cache. ``output_tokens`` includes
    ``reasoning_tokens``, which are those of reasoning.
    """

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response of a model, which extends its conversation.

    ``status``: "completed", "incomplete" or "cancelled". ``incomplete_reason``: "max_output_tokens" or
    "deadline_exceeded" if it is incomplete, else "". ``items``: the output in OpenAI's form, with ids at which a
    conversation can be forked and to which it can be rewound. ``text``, ``reasoning`` and ``tool_calls`` are what the
    messages, reasoning and function calls among them hold. ``left_out``: ids of the items that ``truncation`` left
    out of the prompt. ``request_id``: the X-Request-Id.
    """

    id: str
    model: str
    status: str
    incomplete_reason: str
    items: Sequence[Item]
    text: str
    reasoning: str
    tool_calls: Sequence[ToolCall]
    usage: ResponseUsage
    left_out: Sequence[str]
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePart:
    """The next part of a streamed response.

    ``response_id``: known from the first part on, which has no text; a conversation can be forked at it while the
    response is under way. ``text`` and ``reasoning`` follow those of the parts before. ``response``: the whole
    response in the last part, else None.
    """

    response_id: str
    text: str = ""
    reasoning: str = ""
    response: Response | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationExport:
    """A whole conversation, for this or another server.

    ``token_ids``: the exact tokens of the last prompt and output, for the model file of ``fingerprint``; () and "" if
    they are not known.
    """

    items: Sequence[Item]
    metadata: Mapping[str, str]
    fingerprint: str = ""
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """Puts ``items`` after the item whose id is ``after``; None for the start."""

    items: Sequence[Item]
    after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Puts ``items`` in the place of the item whose id is ``item``."""

    item: str
    items: Sequence[Item]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Takes away the item whose id is ``item``."""

    item: str


Operation = Insert | Replace | Delete
