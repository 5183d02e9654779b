"""The forms in which a prompt may be given: vLLM's."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from caravan.errors import RequestError


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Prompts = Prompt | Sequence[Prompt]

# A prompt as its text or its token ids.
PlainPrompt = str | tuple[int, ...]


def plain_prompts(prompts: Prompts) -> list[PlainPrompt]:
    """Return one entry for each prompt. Raises RequestError."""
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [_plain(prompts)]
    return [_plain(prompt) for prompt in prompts]


def _plain(prompt: Any) -> PlainPrompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        if isinstance(text := prompt.get("prompt"), str):
            return text
        prompt = prompt.get("prompt_token_ids")
    if _is_token_ids(prompt):
        return tuple(map(int, prompt))
    raise RequestError(f"a prompt is a text, a list of token ids, or an object with one of them. Given: {prompt!r:.80}")


def _is_token_ids(prompt: Any) -> bool:
    # Entries may be integers of numpy.
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(hasattr(entry, "__index__") for entry in prompt)
