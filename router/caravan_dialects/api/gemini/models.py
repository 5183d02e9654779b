"""The list of models in Gemini's form."""

from collections.abc import Mapping, Sequence

import msgspec

from caravan_dialects.api.gemini.schema import GeminiModel, GeminiModelList
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.schema import Model
from caravan_scheduler.core.engine import ModelFacts

_DEFAULT_SIZE, _MAX_SIZE = 50, 1000
_GENERATES = ["generateContent", "countTokens"]
_EMBEDS = ["embedContent", "batchEmbedContents"]


def shown_model(model: Model, name: str, facts: Mapping[str, ModelFacts]) -> GeminiModel:
    """Return the entry of ``model`` under one of its names. ``facts``: of models that are loaded, by all own names."""
    known = facts.get(model.id)
    context = msgspec.UNSET if known is None else known.max_sequence_tokens
    methods = list(_GENERATES) if known is None or known.generates else []
    if known is not None and known.embedding_size and model.id not in known.adapters:
        methods += _EMBEDS
    return GeminiModel(
        name=f"models/{name}",
        base_model_id=model.id,
        version="1",
        display_name=name,
        supported_generation_methods=methods,
        input_token_limit=context,
        output_token_limit=context,
    )


def page_of(models: Sequence[GeminiModel], query: Mapping[str, str]) -> GeminiModelList:
    """Return the part of ``models`` that ``pageSize`` and ``pageToken`` name. Raises ValidationError."""
    size = _number("pageSize", query, _DEFAULT_SIZE, f"use 1 to {_MAX_SIZE}")
    if size < 1:
        raise unsupported_field_error("pageSize", f"use 1 to {_MAX_SIZE}", query["pageSize"])
    first = _number("pageToken", query, 0, "use the `nextPageToken` of a page")
    end = first + min(size, _MAX_SIZE)
    return GeminiModelList(
        models=list(models[first:end]), next_page_token=str(end) if end < len(models) else msgspec.UNSET
    )


def _number(field: str, query: Mapping[str, str], default: int, advice: str) -> int:
    given = query.get(field) or str(default)
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise unsupported_field_error(field, advice, given)
    return int(given)
