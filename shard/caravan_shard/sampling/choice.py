"""Chooses the next token of one row of logits: see `SamplingParams` for the order of what is applied."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.draw import Purpose, draw_index, draw_weighted, uniform
from caravan_shard.sampling.feedback import Feedback
from caravan_shard.sampling.order import apply_in_order
from caravan_shard.sampling.penalties import LogitBiases, Penalty
from caravan_shard.sampling.token_candidates import CandidateFilter, filtered, scale

_NO_TOKENS = np.empty(0, np.intp)


class Allowed:
    """A set of tokens, at least one. ``count``: how many they are.

    ``mask``: a bit for each token of the vocabulary, the lowest bit of a byte first; None if only `ids` are known.
    """

    __slots__ = ("_ids", "_size", "count", "mask")

    def __init__(self, count: int) -> None:
        """Use `of` or `from_mask`."""
        self.count = count
        self.mask: NDArray[np.uint8] | None = None
        self._size = 0
        self._ids: NDArray[np.intp] | None = None

    @classmethod
    def of(cls, ids: Sequence[int] | NDArray[np.intp]) -> Self:
        """Allow the tokens with these ids, which are ascending."""
        made = cls(len(ids))
        made._ids = np.asarray(ids, np.intp)
        return made

    @classmethod
    def from_mask(cls, mask: NDArray[np.uint8], vocabulary_size: int) -> Self:
        """Allow the tokens whose bit is set. Ignore bits behind the vocabulary. ``mask`` must not be changed later."""
        made = cls(_count(mask, vocabulary_size))
        made.mask, made._size = mask, vocabulary_size
        return made

    @property
    def ids(self) -> NDArray[np.intp]:
        """Ascending ids of the tokens."""
        if self._ids is None:
            assert self.mask is not None
            bits = np.unpackbits(self.mask, bitorder="little", count=self._size)
            # numpy finds Booleans ten times as fast as bytes.
            self._ids = np.flatnonzero(bits.view(np.bool_))
        return self._ids


def _count(mask: NDArray[np.uint8], size: int) -> int:
    whole, rest = divmod(size, 8)
    count = int(np.bitwise_count(mask[:whole]).sum())
    return count + (int(mask[whole]) & ((1 << rest) - 1)).bit_count() if rest else count


@dataclass(frozen=True, slots=True)
class Choice:
    """The inputs of choosing one token. ``position`` is the position of the new token in its sequence.

    ``allowed``: the tokens that a grammar allows; None for any.
    ``barred``: ids of tokens that must not be chosen, unless the grammar allows no others.
    ``processed`` [vocabulary]: the logits to choose from, instead of those of the model; None for the model's.
    ``feedback``: draws the token, and notes it; None for a plain draw.
    ``biases``: those of ``parameters``, as columns; None if there are none.
    """

    parameters: SamplingParams
    position: int
    penalties: Sequence[Penalty] = ()
    allowed: Allowed | None = None
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
    if choice.allowed is not None and choice.allowed.count == 1:
        return int(choice.allowed.ids[0])
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
    allowed = None if choice.allowed is None else choice.allowed.ids
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
        peak = logits.max()
        if not math.isfinite(peak):
            return int(logits.argmax())  # as below
        weights = scale(logits, peak, parameters.temperature)
        return draw_weighted(np.exp(weights, out=weights), number)
    ids, scaled = filtered(logits, parameters, candidate_filter)
    if len(ids) == 0:
        # The logits are NaN or infinite. That must affect only this sequence: see `rows_without_numbers`.
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


def draws_xtc(choice: Choice) -> bool:
    """Whether XTC is drawn for this token."""
    parameters = choice.parameters
    probability = parameters.xtc_probability
    return probability > 0.0 and probability > uniform(parameters.seed, choice.position, Purpose.XTC)


def _with_xtc_drawn(choice: Choice) -> SamplingParams:
    """Return the parameters, without XTC if it is not drawn for this token."""
    parameters = choice.parameters
    if parameters.xtc_probability == 0.0 or draws_xtc(choice):
        return parameters
    return replace(parameters, xtc_probability=0.0)
