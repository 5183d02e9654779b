"""Bodies and replies of llama-server's ``/completion`` and ``/infill``."""

from typing import Annotated, Any

import msgspec

from caravan_dialects.api.generation.schema import (
    AdapterScales,
    CacheSalt,
    ModelName,
    NoEffect,
    Priority,
    Schema,
    SessionId,
    Speculate,
    SwitchedOff,
    Timeout,
)
from caravan_dialects.api.openai.schema import ModelDownload, ProgressShown, Timings


class MarkedPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text. ``multimodal_data`` must be empty: its marker is a secret of the server; send images in chats."""

    prompt_string: str
    multimodal_data: list[Any] | None = None


Prompt = Annotated[
    str | list[str | int | list[str | int] | MarkedPrompt] | MarkedPrompt,
    msgspec.Meta(
        description="A text, also as an object, or a list that mixes texts and token ids; or a list of such prompts."
    ),
]
LogitBias = Annotated[
    list[tuple[int | str, float | bool]] | dict[str, float | bool] | None,
    msgspec.Meta(
        description="Token ids, or texts for all of their tokens, each with a number that is added to the logit; false "
        "forbids the token. Pairs, or an object, in which an id is a text of digits."
    ),
]


class LlamaServerFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults are the model's, else llama-server's: ``temperature`` 0.8, ``top_k`` 40, ``top_p`` 0.95, ``min_p`` 0.05.

    ``n`` and ``n_cmpl`` mean the same: the number of completions of each prompt.

    ``n_predict``: -1, or more than fits, means all that fits; 0 computes the prompt and generates nothing.
    ``cache_prompt``: false computes the prompt anew.

    ``id_slot`` has no effect, since the router chooses where to compute; nor have ``n_keep`` and ``n_discard``, since
    no token of a prompt is ever discarded, and ``t_max_prompt_ms``, which llama-server ignores too.

    ``samplers``: those that are left out are switched off, the others are applied in this order. ``infill`` has no
    effect. The default order is llama-server's: penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc,
    temperature. With ``mirostat`` the defaults of the filters do not apply.

    ``n_indent``: the output ends at a line that is indented less, from the second line on. ``t_max_predict_ms``: it
    ends at the first line end after this time.

    ``response_fields``: the reply has these fields only; "a/b" moves field ``b`` of ``a`` up under this name. An
    empty list means all fields.

    ``timings_per_token``: each event has ``timings``. ``return_progress``: events before the first token tell how far
    the prompt is computed.

    ``seed``: -1 means a random one. ``repeat_penalty`` counts the last ``repeat_last_n`` tokens, 64 by default.
    """

    model: ModelName = None
    n_predict: int | None = None
    n_indent: int | None = None
    n: int | None = None
    n_cmpl: int | None = None
    n_probs: int | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    cache_prompt: bool | None = None
    t_max_predict_ms: int | None = None
    ignore_eos: bool | None = None
    samplers: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    seed: int | None = None
    logit_bias: LogitBias = None
    grammar: str | None = None
    json_schema: Schema | None = None
    id_slot: NoEffect = None
    t_max_prompt_ms: NoEffect = None
    n_keep: NoEffect = None
    n_discard: NoEffect = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    n_cache_reuse: SwitchedOff = None
    min_keep: SwitchedOff = None
    post_sampling_probs: SwitchedOff = None
    lora: AdapterScales = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    session_id: SessionId = None
    speculate: Speculate = None


class LlamaCompletionRequest(LlamaServerFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: Prompt


class InfillExtra(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of another file. llama.vim adds ``time``."""

    text: str
    filename: str | None = None
    time: NoEffect = None


class InfillRequest(LlamaServerFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The output belongs between ``input_prefix``, followed by ``prompt``, and ``input_suffix``.

    ``input_extra``: parts of other files, the nearest last. Texts that do not fit the context are cut: the first of the
    extra parts, then what is farthest from the gap.
    """

    input_prefix: str
    input_suffix: str
    prompt: str | None = None
    input_extra: list[InfillExtra] | None = None


class TokenProbability(msgspec.Struct, frozen=True):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class TokenProbabilities(msgspec.Struct, frozen=True):
    """A generated token, and the likeliest at its place."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TokenProbability]


class LlamaCompletion(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A whole reply, or an event of a stream; only the last event has the fields from ``model`` on.

    ``id_slot`` is always -1. ``tokens``: in a stream, or with ``return_tokens``. ``tokens_evaluated``: tokens of the
    prompt. ``stop_type``: "eos", "limit" or "word". ``tokens_cached``: tokens of the prompt that were in
    the cache. ``truncated``: whether texts around a gap were cut. ``prompt_progress``: before the first token, with
    ``return_progress``.
    """

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[TokenProbabilities] | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    generation_settings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    prompt: str | msgspec.UnsetType = msgspec.UNSET
    has_new_line: bool | msgspec.UnsetType = msgspec.UNSET
    truncated: bool | msgspec.UnsetType = msgspec.UNSET
    stop_type: str | msgspec.UnsetType = msgspec.UNSET
    stopping_word: str | msgspec.UnsetType = msgspec.UNSET
    tokens_cached: int | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    prompt_progress: ProgressShown | msgspec.UnsetType = msgspec.UNSET


class Modalities(msgspec.Struct, frozen=True):
    """Whether a model reads images, and whether it reads audio."""

    vision: bool
    audio: bool


class ServedContext(msgspec.Struct, frozen=True):
    """``n_ctx``: maximum tokens of a prompt and its output together.

    ``params``: what requests get that do not say it, by llama-server's names.
    """

    n_ctx: int
    params: dict[str, Any]


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """What llama-server's clients read first. ``total_slots``: generations that may be in progress.

    ``model_path``: the model's name, since clients do not learn where files are.
    """

    model_alias: str
    model_path: str
    total_slots: int
    default_generation_settings: ServedContext
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


class Slot(msgspec.Struct, frozen=True):
    """A generation that may be in progress. ``n_ctx``: maximum tokens of its prompt and output."""

    id: int
    n_ctx: int
    is_processing: bool


class ListedAdapter(msgspec.Struct, frozen=True):
    """An adapter. ``path``: its name, which goes to `model`. ``scale``: 1, for that with which it was loaded."""

    id: int
    path: str
    scale: float


class ModelCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``model``: its name, or an alias."""

    model: str


class Success(msgspec.Struct, frozen=True):
    """What was asked for will be done."""

    success: bool


class ModelEventData(msgspec.Struct, frozen=True, omit_defaults=True):
    """``status``: the state that `GET /models` reports; `removed` if the model is gone."""

    status: str
    download: ModelDownload | None = None


class ModelEvent(msgspec.Struct, frozen=True):
    """``event``: always `status_change`."""

    model: str
    event: str
    data: ModelEventData
