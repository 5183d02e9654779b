"""``/v1/embeddings``."""

import base64
import struct
from collections.abc import Sequence

import msgspec
from aiohttp import web

from caravan_router.http.generation.context import Context
from caravan_router.http.generation.prompt import check_token_ids, tokenize_prompt
from caravan_router.http.openai.embeddings.schema import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from caravan_router.http.openai.embeddings.vectors import vectors_of
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.openai.prompts import PromptInput, TextPrompt, split_prompts
from caravan_router.http.openai.rules import DimensionsError
from caravan_router.http.server.body import read_body
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import BODY_ERRORS, JSON, Route

_DECODER = msgspec.json.Decoder(EmbeddingRequest)


async def embeddings(request: web.Request) -> web.Response:
    """Handle ``/v1/embeddings``."""
    body = await read_body(request, _DECODER)

    async def texts_of(context: Context) -> list[tuple[int, ...]]:
        size = context.model.embedding_size
        if body.dimensions is not None and body.dimensions != size:
            raise DimensionsError(size, body.dimensions)
        prompts = split_prompts("input", body.input, context.limits.max_embed_texts)
        return [await _token_ids(context, prompt) for prompt in prompts]

    made = await vectors_of(request, body.model, texts_of)
    encode = _base64 if body.encoding_format == "base64" else list
    reply = EmbeddingList(
        object="list",
        data=[Embedding("embedding", index, encode(vector)) for index, vector in enumerate(made.vectors)],
        model=made.model,
        usage=EmbeddingUsage(made.tokens, made.tokens),
    )
    return json_reply(reply)


async def _token_ids(context: Context, prompt: PromptInput) -> tuple[int, ...]:
    if isinstance(prompt, TextPrompt):
        token_ids = (await tokenize_prompt(context.engine, "input", prompt.text, context.bounds)).token_ids
    else:
        token_ids = prompt.token_ids
    check_token_ids("input", token_ids, context.model.max_embed_tokens, context.model)
    return token_ids


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


ROUTES = (
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=embeddings,
        dialect=OPENAI,
        summary="Return one vector for each text",
        body=(EmbeddingRequest,),
        replies=((JSON, EmbeddingList),),
        errors=(*BODY_ERRORS, 404, 424, 429, 503),
    ),
)
