"""OpenAI's embeddings."""

import base64
import struct
from collections.abc import Sequence

import msgspec
from aiohttp import web

from caravan_router.core.engine import Engine, ModelFacts
from caravan_router.http.generation.bounds import bounds_of, model_of
from caravan_router.http.generation.checks import check_token_ids, tokenize_prompt
from caravan_router.http.generation.permits import holding
from caravan_router.http.generation.prompts import Prompt, TextPrompt, split_prompts
from caravan_router.http.generation.rules import AdapterVectorsError, DimensionsError, NoVectorsError
from caravan_router.http.limits import Limits
from caravan_router.http.openai.embeddings.schema import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from caravan_router.http.server.body import read_body
from caravan_router.http.server.state import CLIENT, STATE

_DECODER = msgspec.json.Decoder(EmbeddingRequest)


async def embeddings(request: web.Request) -> web.Response:
    """A vector for each text. Texts take turns with the passes of generations: one text at a time."""
    state = request.app[STATE]
    body = await read_body(request, _DECODER)
    with holding(state, request[CLIENT], 1):
        model = model_of(state.engine)
        _check(body, model)
        prompts = split_prompts("input", body.input, state.limits.max_embed_texts)
        texts = [await _token_ids(state.engine, state.limits, prompt) for prompt in prompts]
        vectors = await state.engine.queries.embed(texts)
    encode = _base64 if body.encoding_format == "base64" else list
    count = sum(map(len, texts))
    reply = EmbeddingList(
        object="list",
        data=[Embedding("embedding", index, encode(vector)) for index, vector in enumerate(vectors)],
        model=model.name,
        usage=EmbeddingUsage(count, count),
    )
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


def _check(body: EmbeddingRequest, model: ModelFacts) -> None:
    if model.embedding_size == 0:
        raise NoVectorsError
    if body.model is not None and body.model in model.adapters:
        raise AdapterVectorsError(body.model)
    if body.dimensions is not None and body.dimensions != model.embedding_size:
        raise DimensionsError(model.embedding_size, body.dimensions)


async def _token_ids(engine: Engine, limits: Limits, prompt: Prompt) -> tuple[int, ...]:
    model = model_of(engine)
    if isinstance(prompt, TextPrompt):
        token_ids = (await tokenize_prompt(engine, "input", prompt.text, bounds_of(limits, model))).token_ids
    else:
        token_ids = prompt.token_ids
    check_token_ids("input", token_ids, model.max_embed_tokens, model)
    return token_ids


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
