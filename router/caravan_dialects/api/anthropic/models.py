"""The list of models in Anthropic's form."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.schema import Model
from caravan_dialects.api.paging import page_size

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 1000


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """``max_input_tokens``: the context, for prompt and output together, as ``max_tokens``; null if it is not known.

    ``lifecycle``: what is listed can be asked.
    """

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelList(msgspec.Struct, frozen=True):
    """A page of models. ``first_id``, ``last_id``: null on a page without any."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def shown_models(models: Sequence[Model], contexts: Mapping[str, int]) -> list[AnthropicModel]:
    """Return an entry for each name, aliases included: Claude Code lists those that begin with "claude"."""
    return [
        shown_model(model, name, contexts)
        for model in models
        for name in (model.id, *(() if model.aliases is msgspec.UNSET else model.aliases))
    ]


def shown_model(model: Model, name: str, contexts: Mapping[str, int]) -> AnthropicModel:
    """Return the entry of ``model`` under one of its names. ``contexts``: tokens, by the model's own name."""
    context = contexts.get(model.id)
    return AnthropicModel(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=context,
        max_tokens=context,
    )


def page_of(models: Sequence[AnthropicModel], query: Mapping[str, str]) -> AnthropicModelList:
    """Return the part of ``models`` that ``limit``, ``after_id`` and ``before_id`` name. Raises ValidationError."""
    limit = page_size(query, _DEFAULT_LIMIT, _MAX_LIMIT)
    names = [model.id for model in models]
    first = _place("after_id", query["after_id"], names) + 1 if "after_id" in query else 0
    end = _place("before_id", query["before_id"], names) if "before_id" in query else len(models)
    if "before_id" in query and "after_id" not in query:
        more, kept = end > limit, models[max(0, end - limit) : end]
    else:
        more, kept = end - first > limit, models[first : min(end, first + limit)]
    return AnthropicModelList(list(kept), more, kept[0].id if kept else None, kept[-1].id if kept else None)


def _place(field: str, name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise unsupported_field_error(field, "use the `id` of a model", name)
    return names.index(name)
