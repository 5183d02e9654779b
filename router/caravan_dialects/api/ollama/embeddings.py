"""The texts that Ollama's embedding routes embed."""

from collections.abc import Sequence

from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import Truncation, check_token_ids, nth, tokenize_texts, tokenize_truncated
from caravan_dialects.api.generation.rules import too_many_prompts_error
from caravan_dialects.api.ollama import schema as ollama
from caravan_dialects.api.ollama.validation import check_ranges


async def texts_of_embed(body: ollama.OllamaEmbedRequest, context: Context) -> list[tuple[int, ...]]:
    """Return the token ids of each text of ``/api/embed``. Raises ValidationError, EngineError."""
    check_range("dimensions", body.dimensions, 1, context.model.embedding_size)
    limit = _limit(body.options, context)
    # In Ollama, an empty text only loads the model. Here it is always loaded.
    texts = ([body.input] if body.input else []) if isinstance(body.input, str) else body.input or []
    most = context.limits.max_embed_texts
    if len(texts) > most:
        raise too_many_prompts_error("input", most, len(texts))
    return await _token_ids(context, "input", texts, limit, truncate=body.truncate is not False)


async def texts_of_embeddings(body: ollama.OllamaEmbeddingsRequest, context: Context) -> list[tuple[int, ...]]:
    """Return the token ids of the text of ``/api/embeddings``, if there is one. Raises ValidationError, EngineError."""
    limit = _limit(body.options, context)
    texts = [body.prompt] if body.prompt else []
    return await _token_ids(context, "prompt", texts, limit, truncate=body.truncate is not False)


def _limit(options: ollama.OllamaOptions | None, context: Context) -> int:
    """Return the number of tokens that a text may have. Raises ValidationError."""
    limit = context.model.max_embed_tokens
    if options is None:
        return limit
    check_ranges(options, "options.")
    return limit if options.num_ctx is None else min(options.num_ctx, limit)


async def _token_ids(
    context: Context, field: str, texts: Sequence[str], limit: int, *, truncate: bool
) -> list[tuple[int, ...]]:
    engine, bounds = context.engine, context.bounds
    if truncate:
        # Text beyond the longest prompt is far beyond the limit: it need not be tokenized to be cut off.
        texts = [text.encode()[: bounds.max_prompt_bytes].decode(errors="ignore") for text in texts]
    tokens = await tokenize_texts(engine, field, texts, bounds)
    for place, text in enumerate(texts):
        if truncate and len(tokens[place]) > limit:
            cut = await tokenize_truncated(engine, field, text, bounds, Truncation(limit=limit, keep_end=False))
            tokens[place] = cut.token_ids
        check_token_ids(nth(field, place, len(texts)), tokens[place], limit, context.model)
    return tokens
