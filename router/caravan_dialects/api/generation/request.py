"""A validated request. Later stages do not check it again."""

from dataclasses import dataclass

from caravan_dialects.text.assembler import TextOptions
from caravan_dialects.text.detokenize import PromptText
from caravan_scheduler.core.generation import GenerationSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """One prompt: a generation for each candidate, and what the reply needs to know of the request.

    ``text``: how tokens become text. ``characters``: length of the prompt as the client wrote it. ``prompt_text``: set
    if the reply shows prompt tokens.
    """

    specs: tuple[GenerationSpec, ...]
    text: TextOptions
    characters: int
    prompt_text: PromptText | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt, which all candidates share."""
        return self.specs[0].prompt
