"""Ollama's descriptions of the models: ``/api/tags``, ``/api/ps`` and ``/api/show``. What is unknown is left out."""

from datetime import UTC, datetime

import msgspec
from aiohttp import web

from caravan_router.chat.thought_format import thought_format_of
from caravan_router.core.engine import ModelFacts
from caravan_router.http.generation.models import asked_model, listed_models, served_model
from caravan_router.http.ollama import schema as ollama
from caravan_router.http.ollama.reply import time_text
from caravan_router.http.ollama.validation import bare_name
from caravan_router.http.server.body import read_body
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.state import STATE

_SHOW = msgspec.json.Decoder(ollama.OllamaShowRequest)

# Ollama returns a time that is centuries ahead for a model that is never unloaded.
_NEVER = "2300-01-01T00:00:00Z"


async def ollama_tags(request: web.Request) -> web.Response:
    """Handle ``/api/tags``."""
    tags = [
        ollama.OllamaTag(
            name=name,
            model=name,
            modified_at=_modified_at(model),
            size=model.weight_bytes or msgspec.UNSET,
            digest=model.fingerprint,
            details=_details(name, model),
        )
        for model in listed_models(request.app[STATE])
        for name in _names(model)
    ]
    return json_reply(ollama.OllamaTagList(tags))


async def ollama_ps(request: web.Request) -> web.Response:
    """Handle ``/api/ps``: everything that is served is loaded."""
    running = [
        ollama.OllamaRunningModel(
            name=name,
            model=name,
            size=model.weight_bytes or msgspec.UNSET,
            digest=model.fingerprint,
            details=_details(name, model),
            expires_at=_NEVER,
            size_vram=msgspec.UNSET if model.device_bytes is None else model.device_bytes,
            context_length=model.max_sequence_tokens,
        )
        for model in listed_models(request.app[STATE])
        for name in _names(model)
    ]
    return json_reply(ollama.OllamaRunningList(running))


async def ollama_show(request: web.Request) -> web.Response:
    """Handle ``/api/show``."""
    body = await read_body(request, _SHOW)
    name = bare_name(body.model or body.name)
    model = served_model(request.app[STATE], asked_model(request, name)).engine.model
    capabilities = ["completion", "tools"] if model.chat_template else ["completion"]
    if model.fill is not None:
        capabilities.append("insert")
    if thought_format_of(model.chat_template) is not None:
        capabilities.append("thinking")
    if model.embedding_size:
        capabilities.append("embedding")
    return json_reply(
        ollama.OllamaShowReply(
            modified_at=_modified_at(model),
            template=model.chat_template,
            details=_details(name, model),
            model_info=_model_info(model),
            capabilities=capabilities,
        )
    )


def _names(model: ModelFacts) -> tuple[str, ...]:
    return (model.name, *model.adapters)


def _modified_at(model: ModelFacts) -> str | msgspec.UnsetType:
    if not model.modified_s:
        return msgspec.UNSET
    return time_text(datetime.fromtimestamp(model.modified_s, UTC))


def _details(name: str, model: ModelFacts) -> ollama.OllamaDetails:
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


def _model_info(model: ModelFacts) -> dict[str, str | int | bool]:
    info: dict[str, str | int | bool] = {"general.name": model.name, **dict(model.metadata)}
    if model.parameter_count:
        info["general.parameter_count"] = model.parameter_count
    info["caravan.context_length"] = model.max_sequence_tokens
    info["caravan.vocab_size"] = model.vocabulary_size
    return info


def human_number(count: int) -> str:
    """Return ``count`` in the form of Ollama's ``HumanNumber``, such as "134.52M"."""
    for scale, decimals, unit in ((10**9, 1, "B"), (10**6, 2, "M"), (10**3, 0, "K")):
        if count >= scale:
            return f"{count / scale:.{0 if count % scale == 0 else decimals}f}{unit}"
    return str(count)
