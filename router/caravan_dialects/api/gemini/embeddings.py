"""The texts that Gemini's embedding routes embed, and their vectors."""

from collections.abc import Sequence

from caravan_dialects.api.gemini.contents import parts_of, text_of
from caravan_dialects.api.gemini.replies import ContentEmbedding
from caravan_dialects.api.gemini.schema import Content, EmbedContentRequest
from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import check_token_ids, tokenize_texts
from caravan_dialects.api.generation.rules import empty_prompt_error, too_many_prompts_error
from caravan_dialects.api.openai.embeddings.vectors import Vectors, shortened


async def texts_of(
    requests: Sequence[EmbedContentRequest], context: Context, within: str = "requests"
) -> list[tuple[int, ...]]:
    """Return the token ids of each text. ``within``: the list in the body; "" for a body that is the only request.

    Raises ValidationError, EngineError.
    """
    most = context.limits.max_embed_texts
    if len(requests) > most:
        raise too_many_prompts_error(within, most, len(requests))
    names = [f"{within}[{number}]." if within else "" for number in range(len(requests))]
    texts = []
    for name, request in zip(names, requests, strict=True):
        check_range(f"{name}outputDimensionality", request.output_dimensionality, 1, context.model.embedding_size)
        texts.append(_text(f"{name}content", request.content))
    tokens = await tokenize_texts(context.engine, within or "content", texts, context.bounds)
    for name, token_ids in zip(names, tokens, strict=True):
        check_token_ids(f"{name}content", token_ids, context.model.max_embed_tokens, context.model)
    return tokens


def embeddings_of(requests: Sequence[EmbedContentRequest], made: Vectors) -> list[ContentEmbedding]:
    """Return a vector for each request."""
    return [
        ContentEmbedding(shortened(vector, request.output_dimensionality))
        for request, vector in zip(requests, made.vectors, strict=True)
    ]


def _text(field: str, content: Content) -> str:
    text = "\n".join(text_of(named) for named in parts_of(field, content))
    if not text:
        raise empty_prompt_error(field)
    return text
