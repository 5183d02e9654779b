"""Ollama's routes, which many desktop tools use."""

import msgspec
from aiohttp import web

from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.models import asked_model, served_model
from caravan_router.http.ollama import schema as ollama
from caravan_router.http.ollama.embeddings import ollama_embed, ollama_embeddings
from caravan_router.http.ollama.errors import OLLAMA
from caravan_router.http.ollama.models import ollama_ps, ollama_show, ollama_tags
from caravan_router.http.ollama.reply import NOTHING, AnswerReply, Shape, chat_reply, generate_reply
from caravan_router.http.ollama.validation import bare_name, source_of_chat, source_of_generate
from caravan_router.http.server.body import read_body
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import BODY_ERRORS, GENERATION_ERRORS, JSON, LINES, Route
from caravan_router.http.server.state import STATE

_GENERATE = msgspec.json.Decoder(ollama.OllamaGenerateRequest)
_CHAT = msgspec.json.Decoder(ollama.OllamaChatRequest)


async def ollama_generate(request: web.Request) -> web.StreamResponse:
    """Handle ``/api/generate``."""
    body = await read_body(request, _GENERATE)
    if not (body.prompt or body.suffix):
        return _load(request, body, generate_reply)
    return await answer(request, AnswerReply(body, lambda context: source_of_generate(body, context), generate_reply))


async def ollama_chat(request: web.Request) -> web.StreamResponse:
    """Handle ``/api/chat``."""
    body = await read_body(request, _CHAT)
    if not body.messages:
        return _load(request, body, chat_reply)
    return await answer(request, AnswerReply(body, lambda context: source_of_chat(body, context), chat_reply))


def _load(request: web.Request, body: ollama.OllamaFields, shape: Shape) -> web.Response:
    """Answer a request that only loads or unloads the model. The model stays loaded either way."""
    served = served_model(request.app[STATE], asked_model(request, bare_name(body.model)))
    reply = shape(served.engine.model.name, NOTHING)
    reply.done = True
    reply.done_reason = "unload" if body.keep_alive in {0, "0"} else "load"
    return json_reply(reply)


async def ollama_version(request: web.Request) -> web.Response:
    """Handle ``/api/version``."""
    return json_reply(ollama.OllamaVersion(request.app[STATE].info.version))


_EMBED_ERRORS = (*BODY_ERRORS, 404, 424, 429, 503)

ROUTES = (
    Route(
        method="POST",
        path="/api/generate",
        handler=ollama_generate,
        dialect=OLLAMA,
        summary="Generate text for a prompt; streams lines of JSON unless `stream` is false",
        body=(ollama.OllamaGenerateRequest,),
        replies=((JSON, ollama.OllamaGenerateReply), (LINES, ollama.OllamaGenerateReply)),
        errors=GENERATION_ERRORS,
    ),
    Route(
        method="POST",
        path="/api/chat",
        handler=ollama_chat,
        dialect=OLLAMA,
        summary="Answer a conversation; streams lines of JSON unless `stream` is false",
        body=(ollama.OllamaChatRequest,),
        replies=((JSON, ollama.OllamaChatReply), (LINES, ollama.OllamaChatReply)),
        errors=GENERATION_ERRORS,
    ),
    Route(
        method="POST",
        path="/api/embed",
        handler=ollama_embed,
        dialect=OLLAMA,
        summary="Return one vector for each text",
        body=(ollama.OllamaEmbedRequest,),
        replies=((JSON, ollama.OllamaEmbedReply),),
        errors=_EMBED_ERRORS,
    ),
    Route(
        method="POST",
        path="/api/embeddings",
        handler=ollama_embeddings,
        dialect=OLLAMA,
        summary="Return the vector of one text",
        body=(ollama.OllamaEmbeddingsRequest,),
        replies=((JSON, ollama.OllamaEmbeddingsReply),),
        errors=_EMBED_ERRORS,
    ),
    Route(
        method="GET",
        path="/api/tags",
        handler=ollama_tags,
        dialect=OLLAMA,
        summary="List the models and their adapters",
        replies=((JSON, ollama.OllamaTagList),),
        errors=(503,),
    ),
    Route(
        method="GET",
        path="/api/ps",
        handler=ollama_ps,
        dialect=OLLAMA,
        summary="List what is loaded: the models and their adapters",
        replies=((JSON, ollama.OllamaRunningList),),
        errors=(503,),
    ),
    Route(
        method="POST",
        path="/api/show",
        handler=ollama_show,
        dialect=OLLAMA,
        summary="Describe a model",
        body=(ollama.OllamaShowRequest,),
        replies=((JSON, ollama.OllamaShowReply),),
        errors=(*BODY_ERRORS, 404, 503),
    ),
    Route(
        method="GET",
        path="/api/version",
        handler=ollama_version,
        dialect=OLLAMA,
        summary="Return Caravan's version",
        replies=((JSON, ollama.OllamaVersion),),
    ),
)
