"""Ollama's ``/api/embed`` and the older ``/api/embeddings``."""

import time
from functools import partial

import msgspec
from aiohttp import web

from caravan_dialects.api.ollama import schema as ollama
from caravan_dialects.api.ollama.errors import OLLAMA
from caravan_dialects.api.ollama.recipe import options_with
from caravan_dialects.api.ollama.reply import NANOSECONDS
from caravan_dialects.api.ollama.validation import bare_name, texts_of_embed, texts_of_embeddings
from caravan_dialects.api.openai.embeddings import shortened
from caravan_router.http.ollama.keeping import keep_model
from caravan_router.http.ollama.recipes import recipe_for
from caravan_router.http.openai.vectors import vectors_of
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import BODY_ERRORS
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import ARRIVED

ROUTES = Routes(OLLAMA, any_type=True, errors=(*BODY_ERRORS, 404, 424, 429, 503))


@ROUTES.route("POST", "/api/embed", "Return one embedding for each text", reply=ollama.OllamaEmbedReply)
async def ollama_embed(request: web.Request, body: ollama.OllamaEmbedRequest) -> web.Response:
    keep_model(request, body.model, body.keep_alive)
    options = options_with(recipe_for(request, body.model).parameters, body.options)
    meant = msgspec.structs.replace(body, options=options)
    made = await vectors_of(request, bare_name(body.model), partial(texts_of_embed, meant))
    reply = ollama.OllamaEmbedReply(
        model=made.model,
        embeddings=[shortened(vector, body.dimensions) for vector in made.vectors],
        total_duration=int((time.monotonic() - request[ARRIVED]) * NANOSECONDS),
        load_duration=0,
        prompt_eval_count=made.tokens,
    )
    return json_reply(reply)


@ROUTES.route("POST", "/api/embeddings", "Return the embedding of one text", reply=ollama.OllamaEmbeddingsReply)
async def ollama_embeddings(request: web.Request, body: ollama.OllamaEmbeddingsRequest) -> web.Response:
    keep_model(request, body.model, body.keep_alive)
    options = options_with(recipe_for(request, body.model).parameters, body.options)
    meant = msgspec.structs.replace(body, options=options)
    made = await vectors_of(request, bare_name(body.model), partial(texts_of_embeddings, meant))
    reply = ollama.OllamaEmbeddingsReply([number for vector in made.vectors for number in vector])
    return json_reply(reply)
