"""Body fields and reply parts that OpenAI's routes share, with vLLM's extra parameters; and ``/v1/models``."""

from typing import Annotated, Literal

import msgspec

from caravan_dialects.api.generation.schema import (
    EXACT,
    AdapterScales,
    CacheOptions,
    CacheRetention,
    CacheSalt,
    Format,
    ModelName,
    NoEffect,
    OnlyNull,
    Priority,
    PromptCacheKey,
    Schema,
    ServiceTier,
    SessionId,
    Speculate,
    Timeout,
    Unsupported,
)


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``continuous_usage_stats`` (vLLM's): with ``include_usage``, each chunk has the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: NoEffect = None


Prompt = Annotated[
    str | list[str | int | list[int]],
    msgspec.Meta(
        description="A text, a list of texts, the token ids of one prompt, or a list of such lists; not mixed.",
    ),
]


LogitBias = Annotated[
    dict[str, float] | None,
    msgspec.Meta(
        description="A number from -100 to 100 for each token id: it is added to the logit before anything else."
    ),
]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. Null means the default; in ``choice_parameters`` it means the request's own value.

    The fields from ``typical_p`` on are llama-server's. ``repeat_last_n``, ``dry_penalty_last_n``: how many of the last
    tokens the penalties look at; 0 switches them off, -1 means all. ``top_n_sigma``: 0 or below switches it off.
    ``dynatemp_range``: the temperature lies within this range of ``temperature``, low where few tokens are likely.
    ``samplers``: those that are left out are switched off, the others are applied in this order. ``mirostat`` 1 or 2
    samples from what they leave, so that a token has ``mirostat_tau`` bits of surprise on average; ``mirostat_eta``:
    how fast it learns. ``adaptive_target``: samples near this probability, below 0 off; ``adaptive_decay``: how long it
    remembers.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    samplers: list[str] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's constraints; exactly one is set. ``grammar``: GBNF if a line has ``::=``, else llguidance's Lark."""

    json: Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None


class ConstraintFields(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the output: at most one of OpenAI's field, vLLM's fields and llama-server's (the last two).

    ``guided_grammar`` and ``grammar``: GBNF if a line has ``::=``, else llguidance's Lark.
    """

    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: Schema | None = None
    regex: Unsupported = None
    ebnf: Unsupported = None
    structural_tag: Unsupported = None
    guided_whitespace_pattern: Unsupported = None


class GeneratingFields(ConstraintFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat completions share.

    vLLM's are ``include_stop_str_in_output``, ``skip_special_tokens``, ``min_tokens``, ``stop_token_ids`` and
    ``return_token_ids``. ``n_cmpl`` is llama-server's name of ``n``, ``n_predict`` of ``max_tokens``, and
    ``repeat_penalty`` of ``repetition_penalty``. ``cache_prompt`` (llama-server's): false computes the prompt anew.
    ``timings_per_token`` (llama-server's): each chunk has ``timings``. ``seed``: -1 means a random one.

    ``best_of``: the number of outputs generated for each prompt, of which the ``n`` best are returned, by the mean log
    probability of their tokens; ``choice_parameters`` has an entry for each of them.

    With ``use_beam_search``, ``n`` is the width of the search and the number of choices, which come best first: by the
    sum of their log probabilities divided by the number of their tokens to the power of ``length_penalty`` (1 by
    default). ``early_stopping``: Hugging Face's; false by default.
    """

    model: ModelName = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: NoEffect = None
    ignore_eos: bool | None = None
    n: int | None = None
    n_cmpl: int | None = None
    best_of: int | None = None
    choice_parameters: Annotated[list[SamplingFields] | None, msgspec.Meta(extra={EXACT: True})] = None
    logit_bias: LogitBias = None
    priority: Priority = None
    service_tier: ServiceTier = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    session_id: SessionId = None
    prompt_cache_key: PromptCacheKey = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: CacheRetention = None
    speculate: Speculate = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    n_predict: int | None = None
    repeat_penalty: float | None = None
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None
    id_slot: NoEffect = None
    bad_words: Unsupported = None
    allowed_token_ids: OnlyNull = None
    truncate_prompt_tokens: OnlyNull = None
    return_tokens_as_token_ids: Unsupported = None
    logprob_token_ids: OnlyNull = None
    logits_processors: Unsupported = None
    lora: AdapterScales = None
    min_keep: Unsupported = None
    post_sampling_probs: Unsupported = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """``cached_tokens``: prompt tokens that were in the cache when the prompt's first choice started.

    ``image_tokens`` and ``audio_tokens``: those of images and audio; absent if there are none.
    """

    cached_tokens: int
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET
    audio_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """``cache_n``: prompt tokens from the cache; ``prompt_n``: those that were computed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class ProgressShown(msgspec.Struct, frozen=True, kw_only=True):
    """llama-server's: ``processed`` of ``total`` prompt tokens are computed, with the ``cache`` from the cache."""

    total: int
    cache: int
    processed: int
    time_ms: float


class DraftTokens(msgspec.Struct, frozen=True):
    """The number of draft tokens, and how many of them the output has."""

    drafted: int
    accepted: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Draft tokens from the request's ``prediction`` that were accepted, and that were rejected.

    ``draft_tokens``: those of each source that had any: "prediction", "context" (the prompt and the output),
    "constraint", "model" (a draft model), "pool" (ended outputs of the same API key and salt). ``reasoning_tokens``:
    those of the reasoning, without its markers; in chats with a reasoning model.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    draft_tokens: dict[str, DraftTokens]
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, frozen=True):
    """Each prompt counts once; ``completion_tokens`` counts every candidate, returned or not.

    ``completion_tokens_details`` is absent unless there were draft tokens or the model reasons.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class ModelDownload(msgspec.Struct, frozen=True):
    """Bytes that were downloaded, of the total of a model's files."""

    completed: int
    total: int


class ModelStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a model that is loaded on demand, as llama-server's router reports it.

    ``value``: `downloading`, `unloaded`, `loading`, `loaded`, `unloading`; `failed`, while requests for it fail.
    ``download``: while there is one, also of a newer version of a model that is loaded.
    """

    value: str
    failed: bool = False
    download: ModelDownload | None = None


class Architecture(msgspec.Struct, frozen=True):
    """What a model reads: "text", "image", "audio"; and what it writes. As OpenRouter and llama-server report it."""

    input_modalities: list[str]
    output_modalities: list[str]


class Model(msgspec.Struct, frozen=True):
    """``parent``: the model an adapter belongs to; null for the model itself.

    ``created``: when the file was changed, or if that is not known, when the server started. ``status``: of models that
    are loaded on demand. ``aliases``: other names, if there are any. ``architecture``: absent if the model reads text
    only, or if that is not known.
    """

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    status: ModelStatus | msgspec.UnsetType = msgspec.UNSET
    aliases: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    architecture: Architecture | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[Model]
