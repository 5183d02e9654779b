"""Ollama's ``/api/embed`` and the older ``/api/embeddings``."""

import math
import time

import msgspec
from aiohttp import web

from caravan_router.http.generation.checks import check_range
from caravan_router.http.generation.context import Context
from caravan_router.http.generation.prompt import Truncation, check_token_ids, tokenize_prompt, tokenize_truncated
from caravan_router.http.generation.rules import TooManyPromptsError
from caravan_router.http.ollama import schema as ollama
from caravan_router.http.ollama.reply import NANOSECONDS
from caravan_router.http.ollama.validation import bare_name, check_num_ctx
from caravan_router.http.openai.embeddings.vectors import Vector, vectors_of
from caravan_router.http.server.body import read_body
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.state import ARRIVED

_EMBED = msgspec.json.Decoder(ollama.OllamaEmbedRequest)
_EMBEDDINGS = msgspec.json.Decoder(ollama.OllamaEmbeddingsRequest)


async def ollama_embed(request: web.Request) -> web.Response:
    """Handle ``/api/embed``."""
    body = await read_body(request, _EMBED)

    async def texts_of(context: Context) -> list[tuple[int, ...]]:
        check_range("dimensions", body.dimensions, 1, context.model.embedding_size)
        limit = _limit(body.options, context)
        # In Ollama, an empty text only loads the model. Here it is always loaded.
        texts = ([body.input] if body.input else []) if isinstance(body.input, str) else body.input or []
        most = context.limits.max_embed_texts
        if len(texts) > most:
            raise TooManyPromptsError("input", most, len(texts))
        truncate = body.truncate is not False
        return [await _token_ids(context, "input", text, limit, truncate=truncate) for text in texts]

    made = await vectors_of(request, bare_name(body.model), texts_of)
    reply = ollama.OllamaEmbedReply(
        model=made.model,
        embeddings=[_shortened(vector, body.dimensions) for vector in made.vectors],
        total_duration=int((time.monotonic() - request[ARRIVED]) * NANOSECONDS),
        load_duration=0,
        prompt_eval_count=made.tokens,
    )
    return json_reply(reply)


async def ollama_embeddings(request: web.Request) -> web.Response:
    """Handle ``/api/embeddings``."""
    body = await read_body(request, _EMBEDDINGS)

    async def texts_of(context: Context) -> list[tuple[int, ...]]:
        limit = _limit(body.options, context)
        return [await _token_ids(context, "prompt", body.prompt, limit, truncate=False)] if body.prompt else []

    made = await vectors_of(request, bare_name(body.model), texts_of)
    reply = ollama.OllamaEmbeddingsReply([number for vector in made.vectors for number in vector])
    return json_reply(reply)


def _limit(options: ollama.OllamaOptions | None, context: Context) -> int:
    """Return the number of tokens that a text may have. Raises ValidationError."""
    limit = context.model.max_embed_tokens
    if options is None or options.num_ctx is None:
        return limit
    check_num_ctx(options, context.bounds)
    return min(options.num_ctx, limit)


async def _token_ids(context: Context, field: str, text: str, limit: int, *, truncate: bool) -> tuple[int, ...]:
    engine, bounds = context.engine, context.bounds
    if truncate:
        # Text beyond the longest prompt is far beyond the limit: it need not be tokenized to be cut off.
        text = text.encode()[: bounds.max_prompt_bytes].decode(errors="ignore")
        tokens = await tokenize_truncated(engine, field, text, bounds, Truncation(limit=limit, keep_end=False))
    else:
        tokens = await tokenize_prompt(engine, field, text, bounds)
    check_token_ids(field, tokens.token_ids, limit, context.model)
    return tokens.token_ids


def _shortened(vector: Vector, dimensions: int | None) -> list[float]:
    """Return the first ``dimensions`` numbers, scaled to length 1 as Ollama does."""
    if dimensions is None or dimensions == len(vector):
        return list(vector)
    kept = vector[:dimensions]
    length = math.hypot(*kept) or 1.0
    return [number / length for number in kept]
