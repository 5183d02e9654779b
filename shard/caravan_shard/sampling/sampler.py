"""Chooses the next token of each row of logits: see `SamplingParams` for the order of what is applied."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.biases import LogitBiases
from caravan_shard.sampling.draw import Purpose, draw_index, draw_weighted, uniform
from caravan_shard.sampling.feedback import Feedback
from caravan_shard.sampling.order import apply_in_order
from caravan_shard.sampling.penalties import Penalty
from caravan_shard.sampling.token_candidates import CandidateFilter, filtered, scale

_NO_TOKENS = np.empty(0, np.intp)


@dataclass(frozen=True, slots=True)
class Choice:
    """The inputs of choosing one token. ``position`` is the position of the new token in its sequence.

    ``allowed``: ascending ids, at least one, of the tokens that a grammar allows; None for any.
    ``barred``: ids of tokens that must not be chosen, unless the grammar allows no others.
    ``processed`` [vocabulary]: the logits to choose from, instead of those of the model; None for the model's.
    ``feedback``: draws the token, and notes it; None for a plain draw.
    ``biases``: those of ``parameters``, as columns; None if there are none.
    """

    parameters: SamplingParams
    position: int
    penalties: Sequence[Penalty] = ()
    allowed: NDArray[np.intp] | None = None
    barred: Collection[int] = ()
    processed: Floats | None = None
    feedback: Feedback | None = None
    biases: LogitBiases | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether the most likely token may differ from the one with the highest raw logit."""
        biased = self.biases is not None
        return bool(biased or self.penalties or self.barred or self.allowed is not None or self.processed is not None)


def choose_token(logits: Floats, choice: Choice, candidate_filter: CandidateFilter) -> int:
    """Choose a token from raw ``logits`` [vocabulary], which are not changed."""
    if choice.processed is not None:
        logits = choice.processed
    parameters = choice.parameters
    biases = choice.biases
    barred = np.array([*choice.barred], np.intp) if choice.barred else _NO_TOKENS
    if biases is not None or choice.penalties or len(barred):
        logits = logits.copy()
    if biases is not None:
        biases.apply(logits)
    in_order = parameters.order and not parameters.greedy
    if not in_order:
        for penalty in choice.penalties:
            penalty.apply(logits)
    allowed = choice.allowed
    if allowed is not None and len(barred):
        rest = allowed[~np.isin(allowed, barred)]
        allowed = rest if len(rest) else allowed
    elif len(barred):
        logits[barred] = -np.inf
    if allowed is not None and len(allowed) == 1:
        return int(allowed[0])
    if in_order:
        return _choose_in_order(logits, allowed, choice, candidate_filter)
    if allowed is None:
        return _choose(logits, choice, candidate_filter)
    return int(allowed[_choose(logits[allowed], choice, candidate_filter)])


def _choose(logits: Floats, choice: Choice, candidate_filter: CandidateFilter) -> int:
    """Return the index of the chosen one of ``logits`` [candidates], which are in ascending order of token id."""
    parameters = choice.parameters
    # A range around 0 has an order.
    if parameters.temperature == 0.0:
        return int(logits.argmax())
    number = uniform(parameters.seed, choice.position)
    if parameters.xtc_probability > 0.0:
        parameters = _with_xtc_drawn(choice)
    if not parameters.filters:
        weights = scale(logits, logits.max(), parameters.temperature)
        return draw_weighted(np.exp(weights, out=weights), number)
    ids, scaled = filtered(logits, parameters, candidate_filter)
    if len(ids) == 0:
        # The logits are NaN. That must affect only this sequence.
        return int(logits.argmax())
    return int(ids[draw_index(scaled, number)])


def _choose_in_order(
    logits: Floats, allowed: NDArray[np.intp] | None, choice: Choice, candidate_filter: CandidateFilter
) -> int:
    """Return the chosen one of the ``allowed`` tokens, ascending ids, or of all of ``logits`` [vocabulary].

    ``logits`` have the biases, and not the penalties.
    """
    parameters = _with_xtc_drawn(choice)
    number = uniform(parameters.seed, choice.position)
    ids, scaled = apply_in_order(logits, allowed, parameters, choice.penalties, candidate_filter)
    return int(ids[draw_index(scaled, number) if choice.feedback is None else choice.feedback.draw(scaled, number)])


def _with_xtc_drawn(choice: Choice) -> SamplingParams:
    """Return the parameters, without XTC if it is not drawn for this token."""
    parameters = choice.parameters
    if 0.0 < parameters.xtc_probability <= uniform(parameters.seed, choice.position, Purpose.XTC):
        return replace(parameters, xtc_probability=0.0)
    return parameters


class Sampler:
    """Chooses a token for each row of a step; with ``threads`` > 1 they share rows that need more than an argmax."""

    def __init__(self, candidate_filter: CandidateFilter, threads: int) -> None:
        self._filter = candidate_filter
        self._pool = ThreadPoolExecutor(threads, "sampling") if threads > 1 else None

    def choose(self, logits: Floats, choices: Sequence[Choice]) -> list[int]:
        """Return one token for each row of ``logits`` [rows, vocabulary]."""
        costly = [row for row, choice in enumerate(choices) if not choice.parameters.greedy or choice.changes_logits]
        if not costly:
            greedy: list[int] = logits.argmax(axis=1).tolist()
            return greedy
        costly_rows = set(costly)
        tokens = [0 if row in costly_rows else int(logits[row].argmax()) for row in range(len(choices))]

        def choose_row(row: int) -> int:
            return choose_token(logits[row], choices[row], self._filter)

        chosen = self._pool.map(choose_row, costly) if self._pool and len(costly) > 1 else map(choose_row, costly)
        for row, token in zip(costly, chosen, strict=True):
            tokens[row] = token
        return tokens

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
