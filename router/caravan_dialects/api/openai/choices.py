"""How many outputs a prompt gets, and which of them are returned."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_dialects.api.generation.checks import check_candidates
from caravan_dialects.api.generation.run import best_first
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.rules import best_of_above_n_streaming_error, best_of_below_n_error
from caravan_dialects.api.openai.sampling import one_of
from caravan_dialects.api.openai.schema import GeneratingFields
from caravan_dialects.text.assembler import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """``candidates`` >= ``n`` outputs for each prompt, of which the ``n`` best are returned."""

    n: int = 1
    candidates: int = 1

    @property
    def ranked(self) -> bool:
        """Whether some candidates are not returned. Ranking them needs the log probability of each token."""
        return self.candidates > self.n

    def best(self, candidates: Sequence[Sequence[Piece]]) -> Sequence[int]:
        """Return the indices of the candidates to return: the best first, or all in their order."""
        return best_first(candidates)[: self.n] if self.ranked else range(len(candidates))


ONE_CHOICE = Choices()


def choices_of(fields: GeneratingFields, limits: Limits) -> Choices:
    """Count what a prompt gets, before permits are taken. Raises ValidationError."""
    n = number_of_choices(fields.n, fields.n_cmpl, limits)
    candidates = n if fields.best_of is None else fields.best_of
    check_candidates("best_of", candidates, limits)
    if candidates < n:
        raise best_of_below_n_error(n, candidates)
    choices = Choices(n=n, candidates=candidates)
    if fields.stream:
        check_streamed(choices)
    return choices


def check_streamed(choices: Choices) -> None:
    """Require that all candidates are returned. Raises ValidationError."""
    if choices.ranked:
        raise best_of_above_n_streaming_error(choices.n, choices.candidates)


def number_of_choices(n: int | None, n_cmpl: int | None, limits: Limits) -> int:
    """Return the number of choices, which has two names; 1 by default. Raises ValidationError."""
    given = one_of("n", "n_cmpl", n, n_cmpl)
    choices = 1 if given is None else given
    check_candidates("n_cmpl" if n is None and n_cmpl is not None else "n", choices, limits)
    return choices
