"""The texts of one request: OpenAI's clients send one or several, as text or as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_dialects.api.generation.prompt import nth
from caravan_dialects.api.generation.rules import empty_prompt_error, too_many_prompts_error
from caravan_dialects.api.openai.rules import mixed_prompt_error
from caravan_scheduler.core.media import Embeddings


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingsPrompt:
    """Embeddings in place of tokens. ``rows``: them, or a file of them in base64, which ``field`` has."""

    field: str
    rows: Embeddings | str


PromptInput = TextPrompt | TokensPrompt | EmbeddingsPrompt


def embeddings_prompts(field: str, given: str | Sequence[str] | None) -> list[PromptInput]:
    """Return one entry per file of embeddings."""
    files = [given] if isinstance(given, str) else given or []
    return [EmbeddingsPrompt(nth(field, number, len(files)), file) for number, file in enumerate(files)]


def split_prompts(field: str, given: str | Sequence[str | int | list[int]], limit: int) -> list[PromptInput]:
    """Return one entry per text, at most ``limit``, before anything is tokenized. Raises ValidationError."""
    if isinstance(given, str):
        return [TextPrompt(given)]
    if not given:
        raise empty_prompt_error(field)
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [TokensPrompt(tuple(ids))]
    prompts: list[PromptInput] = []
    kinds = set()
    for item in given:
        kinds.add(type(item))
        if isinstance(item, str):
            prompts.append(TextPrompt(item))
        elif isinstance(item, list):
            prompts.append(TokensPrompt(tuple(item)))
    if len(kinds) > 1:
        raise mixed_prompt_error(field)
    if len(prompts) > limit:
        raise too_many_prompts_error(field, limit, len(prompts))
    return prompts
