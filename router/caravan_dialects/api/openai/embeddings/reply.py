"""The texts that ``/v1/embeddings`` embeds, and its reply."""

import base64
import struct
from collections.abc import Sequence

from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import check_token_ids, nth, tokenize_texts
from caravan_dialects.api.openai.embeddings.schema import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from caravan_dialects.api.openai.embeddings.vectors import Vectors
from caravan_dialects.api.openai.prompts import TextPrompt, TokensPrompt, split_prompts
from caravan_dialects.api.openai.rules import dimensions_error


async def texts_of(body: EmbeddingRequest, context: Context) -> list[tuple[int, ...]]:
    """Return the token ids of each text. Raises ValidationError, EngineError."""
    size = context.model.embedding_size
    if body.dimensions is not None and body.dimensions != size:
        raise dimensions_error(size, body.dimensions)
    prompts = split_prompts("input", body.input, context.limits.max_embed_texts)
    texts = [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)]
    given = [prompt.token_ids for prompt in prompts if isinstance(prompt, TokensPrompt)]
    # A request has one or the other.
    tokens = given or await tokenize_texts(context.engine, "input", texts, context.bounds)
    for number, token_ids in enumerate(tokens):
        check_token_ids(nth("input", number, len(tokens)), token_ids, context.model.max_embed_tokens, context.model)
    return tokens


def reply_of(body: EmbeddingRequest, made: Vectors) -> EmbeddingList:
    """Return the reply."""
    encode = _base64 if body.encoding_format == "base64" else list
    return EmbeddingList(
        object="list",
        data=[Embedding("embedding", index, encode(vector)) for index, vector in enumerate(made.vectors)],
        model=made.model,
        usage=EmbeddingUsage(made.tokens, made.tokens),
    )


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
