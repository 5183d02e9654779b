"""Bodies of OpenAI's routes, with vLLM's extra parameters."""

from typing import Annotated

import msgspec

from caravan_router.http.generation.constraint_fields import Format, Schema, StructuredOutputs
from caravan_router.http.generation.serving_fields import CacheSalt, Priority, Timeout


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


Prompt = Annotated[
    str | list[str | int | list[int]],
    msgspec.Meta(
        description="A text, a list of texts, the token ids of one prompt, or a list of such lists; not mixed.",
    ),
]


LogitBias = Annotated[
    dict[str, float] | None,
    msgspec.Meta(description="Token ids to what is added to their logits, -100 to 100, before anything else is done."),
]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen; null is the default, in ``choice_parameters`` what the request itself says."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ConstraintFields(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the output must match: at most one of OpenAI's field, vLLM's, and llama-server's (the last two).

    ``guided_grammar``: GBNF if a line has ``::=``, else Lark as llguidance reads it; so ``grammar``.
    """

    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: Schema | None = None


class CompletionRequest(ConstraintFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model``: an adapter's name; any other stands for the model itself. ``max_tokens``: 16 by default, as OpenAI has
    it; 0 is for ``echo`` with ``logprobs``, which then scores the prompt and nothing else.

    ``choice_parameters``: one entry a choice (a candidate, with ``best_of``); what it sets differs from the request.
    Choice ``i`` draws from (``seed``, ``i``), the first from ``seed`` itself, and from a seed of its own as it is.
    """

    prompt: Prompt
    model: str | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    choice_parameters: list[SamplingFields] | None = None
    # A struct has one base only: these are those of ServingFields.
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    suffix: str | None = None
    logit_bias: LogitBias = None


class Logprobs(msgspec.Struct, frozen=True):
    """Columns, one entry a token; ``text_offset`` counts characters of the choice's text.

    With ``echo`` the prompt's tokens come first. The very first follows nothing: its entries are null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """``rank``: 1 for the likeliest; null for one that is not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(msgspec.Struct):
    """``prompt_logprobs``: vLLM's, there if asked for: of each token of the prompt by id, null of the first."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """``cached_tokens``: had been computed before; of several choices of a prompt, what the first found."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Each prompt counts once; ``completion_tokens`` counts every candidate, returned or not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Completion(msgspec.Struct):
    """Also one chunk of a stream; there ``usage`` is absent unless asked for, and null before the last chunk."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Model(msgspec.Struct, frozen=True):
    """``parent``: the model that an adapter belongs to; null for the model itself."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[Model]
