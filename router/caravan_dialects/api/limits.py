"""Limits on what clients may ask for: those that the operator sets, and what results from them and the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from caravan_proto.limits import MAX_CONSTRAINT_BYTES
from caravan_proto.messages.sampling import MAX_TOKENS
from caravan_scheduler.core.engine import ModelFacts

# A text with more bytes per token is refused without tokenizing it. Only unusual texts have more, such as many spaces.
BYTES_PER_TOKEN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that the operator sets. Names and meaning are TGI's where TGI has them. None: the model's own limit."""

    max_concurrent_requests: int = 128
    """Generations in progress, queued ones included. Further ones are refused with status 429."""
    max_best_of: int = 16
    """Bound of ``n`` and ``best_of``: candidates per prompt."""
    max_stop_sequences: int | None = None
    """None: 4 on TGI's routes, as in TGI, and 64 on all others."""
    max_stop_bytes: int = 256
    """Bytes of a stop string in UTF-8. A reply holds back up to this much text that may start a stop string."""
    max_top_n_tokens: int = 5
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    """Tokens of prompt and output together."""
    max_prompt_bytes: int | None = None
    """Bytes of a prompt in UTF-8, checked before it is tokenized. None: 32 times ``max_total_tokens``."""
    max_client_batch_size: int = 32
    """Prompts per request."""
    max_embed_texts: int = 2048
    """Texts per request for embeddings, as in OpenAI's API. The shards limit the tokens of each text."""
    max_logit_biases: int = 300
    """Entries of a ``logit_bias``, as in OpenAI's API."""
    max_constraint_bytes: int = MAX_CONSTRAINT_BYTES
    """Bytes in UTF-8 of a JSON schema, regular expression, grammar or list of choices."""
    max_tools: int = 128
    """Tools per request, as in OpenAI's API."""
    max_media: int = 8
    """Pictures and sounds per request."""
    max_cache_salt_bytes: int = 256
    """Bytes of a ``cache_salt`` in UTF-8."""
    max_background: int = 16
    """Responses of an API key that are generated in the background at a time. Further ones are refused."""
    background_life_s: float = 28_800.0
    """Seconds that such a response may take, and that its events are kept after its end."""
    batch_concurrency: int = 32
    """Requests of batches that run or wait at a time, of all batches together."""
    max_request_new_tokens: int | None = None
    """New tokens of all prompts and candidates of a request. None: ``max_best_of`` times the limit of one."""
    max_draft_tokens: int = 0
    """Draft tokens of a sequence in one step, by default and at most. 0: no speculation."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of chat templates, for requests that do not set them."""
    reasoning_budget: int | None = None
    """Most tokens of a thought, for requests that do not name a number."""
    reasoning_effort: str | None = None
    """Effort of thoughts, for requests that do not name one. "none": no thoughts, unless a request asks for them."""
    websockets: bool = True
    """Whether responses can be asked for over WebSocket."""
    socket_life_s: float = 3600.0
    """Time that a WebSocket connection may be open, as in OpenAI's API."""
    strict_fields: bool = False
    """Whether unknown fields are refused, but for those of agents' own routes; else they are ignored."""
    payload_limit: int | None = None
    """Bytes of a request's body after decompression. None: 2,000,000, or 32 MiB where a model sees or hears."""
    max_bodies_bytes: int = 512 << 20
    """Bytes of the bodies of all open requests, and of what is decoded from them. Further ones are answered 503."""
    max_connections: int = 1000
    """Open connections, idle ones included. Further ones are answered 503 and closed."""
    header_timeout_s: float = 20.0
    """Time from opening a connection to the end of its first request's headers."""
    body_timeout_s: float = 60.0
    """Time from the end of a request's headers to the end of its body."""
    slow_client_timeout_s: float = 30.0
    """Time after which a client that reads nothing of its reply is cut off."""
    keep_alive_s: float = 15.0
    """Silence after which a stream sends a comment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The smaller of the operator's and the model's limit, for each limit.

    ``usual_new_tokens``: what requests get that name no number; None for the API's own default.
    """

    max_total_tokens: int
    max_input_tokens: int
    max_top_n_tokens: int
    max_prompt_bytes: int
    max_request_new_tokens: int
    usual_new_tokens: int | None = None


def bounds_of(limits: Limits, model: ModelFacts) -> Bounds:
    """Combine the limits of the operator and the model. ``max_input_tokens`` leaves room for at least one new token."""
    total = min(limits.max_total_tokens or model.max_sequence_tokens, model.max_sequence_tokens)
    return Bounds(
        max_total_tokens=total,
        max_input_tokens=min(limits.max_input_tokens or total - 1, total - 1),
        max_top_n_tokens=min(limits.max_top_n_tokens, model.max_top_n_tokens),
        max_prompt_bytes=min(limits.max_prompt_bytes or BYTES_PER_TOKEN * total, model.max_tokenize_bytes),
        max_request_new_tokens=limits.max_request_new_tokens or limits.max_best_of * total,
        usual_new_tokens=dict[str, Any](model.request_defaults).get(MAX_TOKENS),
    )
