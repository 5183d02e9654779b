"""What a model returns. Names and fields are vLLM's where vLLM has them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsFloat

from caravan.reprs import short_repr


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural logarithm of a token's probability. ``rank``: 1 for the likeliest token; None if it is not known."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call to a tool that was offered. ``arguments`` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One output of a prompt, or in a stream the next part of it.

    ``token_ids`` includes the end token. ``logprobs`` has an entry for each token, by token id, if asked for.
    ``finish_reason``: "stop", "length" or in chats "tool_calls"; None in a stream before the last part.
    ``stop_reason``: the stop token's id, or the stop string, that ended the output; else None. ``reasoning`` and
    ``tool_calls`` are parts of a chat's output, beside its ``text``.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The outputs of one prompt; in a stream, the next part of one output.

    ``prompt``: the text of the prompt, None if it was given as token ids or as messages. ``prompt_logprobs``: one entry
    for each token, by token id, if asked for; None for the first. ``num_cached_tokens``: how many of the
    ``num_prompt_tokens`` were in the cache. Cells of images and audio count as tokens and have no id. ``left_out``:
    places of the messages that ``truncation`` left out of the prompt.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    left_out: Sequence[int] = ()

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A reply of a chat session.

    ``text``, ``reasoning``, ``tool_calls``, ``finish_reason`` and ``token_ids`` are those of `CompletionOutput`.
    ``cached_tokens``: tokens of the prompt, of which there are ``prompt_tokens``, that were in the cache. ``left_out``:
    places of the messages that ``truncation`` left out of the prompt.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    finish_reason: str = ""
    token_ids: Sequence[int] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    left_out: Sequence[int] = ()

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPart:
    """The next part of a streamed reply, whose ``text`` and ``reasoning`` follow those of the parts before.

    ``reply``: the whole reply in the last part, else None.
    """

    text: str = ""
    reasoning: str = ""
    reply: ChatReply | None = None

    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector of length 1."""

    embedding: Sequence[float]

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """The vector of one text."""

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: EmbeddingOutput
    finished: bool = True

    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The cosine similarity of two texts; from a model that ranks, the relevance of the second text, from 0 to 1."""

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequestOutput:
    """The score of one pair of texts."""

    request_id: str
    outputs: ScoringOutput
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token that was sampled.

    ``piece``: its raw bytes; a character may be split over several tokens. ``special``: it is no part of the text.
    ``ends``: it ends an output. ``text``: its bytes as text, with U+FFFD for bytes that form no character; "" if it is
    no part of the text. In `Conversation.generate`, it is what the token adds to the text of the output.
    """

    id: int
    piece: bytes
    special: bool
    ends: bool
    text: str
    _logprob: SupportsFloat = field(repr=False, compare=False)

    @property
    def logprob(self) -> float:
        """Natural logarithm of its probability under the model's own distribution. It is computed when it is read."""
        return float(self._logprob)
