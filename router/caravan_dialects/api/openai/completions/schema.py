"""Bodies and replies of ``/v1/completions``."""

import msgspec

from caravan_dialects.api.openai.schema import GeneratingFields, Prompt, Timings, Usage


class CompletionRequest(GeneratingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``max_tokens``: 16 by default, as in OpenAI's API; -1: all that fits; 0 is allowed with ``echo``, to get only the
    prompt's logprobs.

    ``choice_parameters``: one entry per choice (per candidate, with ``best_of``); its fields override the request's.
    ``prompt_embeds``: vLLM's, embeddings [tokens, size] in place of tokens: files of torch.save or numpy.save, in
    base64. Each is a prompt, before those of ``prompt``, which may then be empty.
    ``suffix``: the output belongs between ``prompt`` and this text; for models whose vocabulary has tokens for that.
    Choice ``i`` is sampled with (``seed``, ``i``), the first one with ``seed``; an entry's own ``seed`` is used as it
    is.
    """

    prompt: Prompt | None = None
    prompt_embeds: str | list[str] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    suffix: str | None = None


class Logprobs(msgspec.Struct, frozen=True):
    """Columns with one entry per token; ``text_offset`` counts characters of the choice's text.

    With ``echo`` the prompt's tokens come first. The first prompt token has no probability: its entries are null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """``rank``: 1 for the likeliest token; null for a token beyond the number asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(msgspec.Struct):
    """``prompt_logprobs``: vLLM's, if asked for: one entry per prompt token, by token id; null for the first.

    ``token_ids``, ``prompt_token_ids``: vLLM's, with ``return_token_ids``; a stream has the latter in a choice's first
    chunk. In a whole reply ``prompt_logprobs`` and ``prompt_token_ids`` are null unless asked for, as in vLLM, whose
    clients read them without a check.
    """

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct):
    """A reply, or one chunk of a stream: there ``usage`` is absent unless asked for, and null before the last chunk.

    ``timings``: of the choice, with ``timings_per_token``.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
