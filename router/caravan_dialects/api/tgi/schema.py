"""Bodies and replies of TGI's routes. Optional fields accept an explicit null, which TGI's clients send."""

from typing import Annotated

import msgspec

from caravan_dialects.api.generation.schema import CacheSalt, Format, ModelName, Priority, SessionId, Speculate, Timeout


def _bounds(**bounds: float) -> msgspec.Meta:
    """Return bounds for the description of a field. Its values are checked elsewhere, with TGI's messages."""
    return msgspec.Meta(extra_json_schema=dict(bounds))


class GenerateParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Absent and null fields have TGI's default. ``do_sample``: false, but true without any ``parameters``.

    ``seed``: -1 means a random one. ``min_new_tokens``, which TGI lacks: the number of first tokens within which no end
    token and no stop string counts.
    """

    best_of: int | None = None
    temperature: Annotated[float | None, _bounds(exclusiveMinimum=0)] = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Annotated[int | None, _bounds(minimum=1)] = None
    top_p: Annotated[float | None, _bounds(exclusiveMaximum=1)] = None
    typical_p: Annotated[float | None, _bounds(exclusiveMaximum=1)] = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int | None, _bounds(minimum=-1)] = None
    top_n_tokens: int | None = None
    grammar: Format | None = None
    adapter_id: str | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    inputs: str
    parameters: GenerateParameters | None = None
    model: ModelName = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    session_id: SessionId = None
    speculate: Speculate = None


class CompatGenerateRequest(GenerateRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /``: ``stream`` chooses between the two forms of reply."""

    stream: bool | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    inputs: str
    add_special_tokens: bool | None = None
    model: ModelName = None


class Token(msgspec.Struct, frozen=True):
    """``text`` is "" while a character is incomplete: it comes with the token that completes it."""

    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float | None


class BestOfSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that was not ranked best."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | msgspec.UnsetType = msgspec.UNSET


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """``seed`` is null for greedy decoding; ``top_tokens``, if asked for, has one list per token.

    ``cached_tokens``: prompt tokens that were in the cache. ``best_of_sequences``: present if ``best_of`` > 1.
    """

    finish_reason: str
    generated_tokens: int
    cached_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | msgspec.UnsetType = msgspec.UNSET
    top_tokens: list[list[Token]] | msgspec.UnsetType = msgspec.UNSET


class GenerateResponse(msgspec.Struct, frozen=True):
    generated_text: str
    details: Details | msgspec.UnsetType = msgspec.UNSET


class StreamDetails(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int
    cached_tokens: int


class StreamEvent(msgspec.Struct):
    """One token. ``generated_text`` and ``details`` are null until the last event; ``index`` starts at 1."""

    index: int
    token: Token
    generated_text: str | None
    details: StreamDetails | None
    top_tokens: list[Token] | msgspec.UnsetType = msgspec.UNSET


class TokenizedToken(msgspec.Struct, frozen=True):
    """``start`` and ``stop`` count characters of the input."""

    id: int
    text: str
    start: int
    stop: int


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of llama-server and of vLLM."""

    tokens: list[int]
    model: ModelName = None


class DetokenizedText(msgspec.Struct, frozen=True):
    """The text as ``content``, which llama-server's clients read, and as ``prompt``, which vLLM's read.

    Control tokens are part of it. A character whose bytes are incomplete is U+FFFD.
    """

    content: str
    prompt: str


class ChatTokens(msgspec.Struct, frozen=True):
    """A rendered conversation and its tokens."""

    tokenize_response: list[TokenizedToken]
    templated_text: str


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """TGI's fields, then Caravan's. ``router`` has TGI's value: clients recognise the API by it.

    The model is the one that the header X-Model names, or the default. ``models`` has the names of all, the default
    first. ``draft_model``: the name of the model's draft model, if it has one. ``request_defaults``: what requests
    of other APIs get that do not say it, as the model's file or the operator has it. ``max_loras``: most adapters that
    may be loaded at a time while shards run, 0 without ``--lora-dir``. ``loaded_loras``: how many are, with those whose
    last requests run.
    """

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    server: str
    waiting_served_ratio: float | None
    max_waiting_tokens: int | None
    max_batch_prefill_tokens: int | None
    max_batch_total_tokens: int
    max_batch_size: int | None
    models: list[str]
    draft_model: str | None
    request_defaults: dict[str, float]
    max_loras: int
    loaded_loras: int
