"""Ollama's descriptions of models and their adapters. What is unknown is left out."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from caravan_dialects.api.ollama import schema as ollama
from caravan_dialects.api.ollama.recipe import parameters_text, recipe_of
from caravan_dialects.api.ollama.reply import time_text
from caravan_dialects.chat.thought_format import thought_format_of
from caravan_proto.messages.model import ModelFile
from caravan_scheduler.core.catalogue import CatalogueModel, MadeModel, ModelDescription, ModelState
from caravan_scheduler.core.engine import ModelFacts

# Ollama returns a time that is centuries ahead for a model that is never unloaded.
_NEVER = "2300-01-01T00:00:00Z"
_IN_MEMORY = (ModelState.LOADED, ModelState.UNLOADING)


def tags_of(models: Iterable[ModelFacts], catalogue: Mapping[str, CatalogueModel]) -> ollama.OllamaTagList:
    """List models and their adapters, and those of ``catalogue`` that were never loaded."""
    known = list(models)
    tags = [
        ollama.OllamaTag(
            name=name,
            model=name,
            modified_at=_modified_at(model),
            size=model.weight_bytes or msgspec.UNSET,
            digest=model.digest,
            details=_details(name, model),
        )
        for model in known
        for name in _names(model)
    ]
    seen = {model.name for model in known}
    tags += [_unseen(model) for model in catalogue.values() if model.name not in seen]
    return ollama.OllamaTagList(tags)


def _unseen(model: CatalogueModel) -> ollama.OllamaTag:
    """Describe a model that was never loaded, of which no more than its file is known."""
    return ollama.OllamaTag(
        name=model.name,
        model=model.name,
        modified_at=_time_of(model.modified_s),
        size=model.size_bytes or msgspec.UNSET,
        digest=model.fingerprint,
        details=ollama.OllamaDetails(parent_model="", format="gguf"),
    )


def tags_of_made(made: Iterable[MadeModel], tags: ollama.OllamaTagList) -> list[ollama.OllamaTag]:
    """List models that were made of others, which are among ``tags``."""
    bases = {tag.name: tag for tag in tags.models}
    return [
        msgspec.structs.replace(
            base,
            name=one.name,
            model=one.name,
            modified_at=_time_of(one.made_s),
            details=msgspec.structs.replace(base.details, parent_model=one.base),
        )
        for one in made
        if (base := bases.get(one.base)) is not None
    ]


def described_made(made: MadeModel, base: ollama.OllamaShowReply) -> ollama.OllamaShowReply:
    """Describe a model that was made of another one, which ``base`` describes."""
    recipe = recipe_of(made.recipe)
    return msgspec.structs.replace(
        base,
        modified_at=_time_of(made.made_s),
        details=msgspec.structs.replace(base.details, parent_model=made.base),
        parameters=parameters_text(recipe.parameters) or msgspec.UNSET,
        system=recipe.system or msgspec.UNSET,
        license="\n".join(recipe.license) or msgspec.UNSET,
    )


def loaded(
    models: Iterable[ModelFacts], catalogue: Mapping[str, CatalogueModel], now_s: float
) -> ollama.OllamaRunningList:
    """List the models that are loaded, and their adapters: all, but for those of ``catalogue`` that are not.

    ``now_s``: Unix time.
    """
    running = [
        ollama.OllamaRunningModel(
            name=name,
            model=name,
            size=model.weight_bytes or msgspec.UNSET,
            digest=model.digest,
            details=_details(name, model),
            expires_at=_expiry(catalogue.get(model.name), now_s),
            size_vram=msgspec.UNSET if model.device_bytes is None else model.device_bytes,
            context_length=model.max_sequence_tokens,
        )
        for model in models
        if model.name not in catalogue or catalogue[model.name].state in _IN_MEMORY
        for name in _names(model)
    ]
    return ollama.OllamaRunningList(running)


def _expiry(model: CatalogueModel | None, now_s: float) -> str:
    if model is None or model.expires_in_s is None:
        return _NEVER
    return time_text(datetime.fromtimestamp(now_s + model.expires_in_s, UTC))


def described(name: str, model: ModelFacts) -> ollama.OllamaShowReply:
    """Describe the model, or the adapter called ``name``."""
    info = _model_info(model) | {
        "caravan.context_length": model.max_sequence_tokens,
        "caravan.vocab_size": model.vocabulary_size,
    }
    capabilities = _capabilities(model, generates=model.generates, fills=model.fill is not None)
    if model.embedding_size:
        capabilities.append("embedding")
    return _show_reply(name, model, info, capabilities)


def described_cold(model: ModelDescription) -> ollama.OllamaShowReply:
    """Describe a model by its files, since it is not loaded. An encoder alone is known to have vectors."""
    capabilities = _capabilities(model.file, generates=model.generates, fills=model.fills)
    return _show_reply(model.file.name, model.file, _model_info(model.file), capabilities or ["embedding"])


def _show_reply(
    name: str, model: ModelFile, info: dict[str, str | int | bool], capabilities: list[str]
) -> ollama.OllamaShowReply:
    return ollama.OllamaShowReply(
        modified_at=_modified_at(model),
        template=model.chat_template,
        details=_details(name, model),
        model_info=info,
        capabilities=capabilities,
    )


def _capabilities(model: ModelFile, *, generates: bool, fills: bool) -> list[str]:
    if not generates:
        return []
    found = ["completion"]
    if model.chat_template:
        found.append("tools")
    if fills:
        found.append("insert")
    if thought_format_of(model.chat_template) is not None:
        found.append("thinking")
    if model.media is not None:
        found += [name for name, known in (("vision", model.media.images), ("audio", model.media.audio)) if known]
    return found


def _names(model: ModelFacts) -> tuple[str, ...]:
    return (model.name, *model.adapters)


def _modified_at(model: ModelFile) -> str | msgspec.UnsetType:
    return _time_of(model.modified_s)


def _time_of(seconds: float) -> str | msgspec.UnsetType:
    return time_text(datetime.fromtimestamp(seconds, UTC)) if seconds else msgspec.UNSET


def _details(name: str, model: ModelFile) -> ollama.OllamaDetails:
    """Describe the model, or the adapter called ``name``, which has the model for its parent."""
    known = bool(model.architecture)
    return ollama.OllamaDetails(
        parent_model=model.name if name in model.adapters else "",
        format="gguf",
        family=model.architecture if known else msgspec.UNSET,
        families=[model.architecture] if known else msgspec.UNSET,
        parameter_size=human_number(model.parameter_count) if model.parameter_count else msgspec.UNSET,
        quantization_level=model.quantization or msgspec.UNSET,
    )


def _model_info(model: ModelFile) -> dict[str, str | int | bool]:
    info: dict[str, str | int | bool] = {"general.name": model.name, **dict(model.metadata)}
    if model.parameter_count:
        info["general.parameter_count"] = model.parameter_count
    return info


def human_number(count: int) -> str:
    """Return ``count`` in the form of Ollama's ``HumanNumber``, such as "134.52M"."""
    for scale, decimals, unit in ((10**9, 1, "B"), (10**6, 2, "M"), (10**3, 0, "K")):
        if count >= scale:
            return f"{count / scale:.{0 if count % scale == 0 else decimals}f}{unit}"
    return str(count)
