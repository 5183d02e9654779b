"""A checked request."""

from dataclasses import dataclass

from caravan_router.core.generation import GenerationSpec
from caravan_router.text.prompt_text import PromptText


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """One prompt: a generation for each candidate, and what its reply says of the request.

    ``characters``: of the prompt as the client wrote it. ``prompt_text``: where the reply shows the prompt's tokens.
    """

    specs: tuple[GenerationSpec, ...]
    stops: tuple[str, ...]
    characters: int
    prompt_text: PromptText | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """The same for all candidates."""
        return self.specs[0].prompt
