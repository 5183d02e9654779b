"""Chooses the next token of each row of logits, and says how likely it is: of rows together where that is possible."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.choice import Choice, choose_token, draws_xtc
from caravan_shard.sampling.draw import uniform
from caravan_shard.sampling.joint_draw import LEFT, Filters, JointDraw, Row, joint_filters, leave_all
from caravan_shard.sampling.logprobs import JointLogprobs, LogprobRow, TokenLogprobs, leave_all_logprobs, row_logprobs
from caravan_shard.sampling.penalties import Change
from caravan_shard.sampling.token_candidates import CandidateFilter

# So many parameters of sequences are remembered.
_MOST_KNOWN = 1024
# An argmax of fewer logits takes less time than it takes to share them between threads.
_SHARED_LOGITS = 1_000_000


class Sampler:
    """Chooses a token for each row of a step; with ``threads`` > 1 they share rows that need more than an argmax."""

    def __init__(
        self,
        candidate_filter: CandidateFilter,
        threads: int,
        joint_draw: JointDraw = leave_all,
        joint_logprobs: JointLogprobs = leave_all_logprobs,
    ) -> None:
        self._filter = candidate_filter
        self._draw = joint_draw
        self._logprobs = joint_logprobs
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "sampling") if threads > 1 else None
        self._known: dict[int, tuple[SamplingParams, Filters | None]] = {}

    def choose(self, logits: Floats, choices: Sequence[Choice]) -> list[int]:
        """Return one token for each row of ``logits`` [rows, vocabulary].

        The logits are changed meanwhile, and are as before afterwards.
        """
        shares = self._draw.threads > 1 and logits.size >= _SHARED_LOGITS
        costly = [
            row for row, choice in enumerate(choices) if shares or not choice.parameters.greedy or choice.changes_logits
        ]
        if not costly:
            greedy: list[int] = logits.argmax(axis=1).tolist()
            return greedy
        tokens = [LEFT] * len(choices)
        if len(costly) < len(choices):
            for row in set(range(len(choices))).difference(costly):
                tokens[row] = int(logits[row].argmax())
        if self._pool is None or len(costly) == 1:
            self._choose_rows(logits, costly, choices, tokens)
            return tokens
        parts = [costly[start :: self._threads] for start in range(self._threads)]
        for _ in self._pool.map(lambda part: self._choose_rows(logits, part, choices, tokens), parts):
            pass
        return tokens

    def logprobs(self, logits: Floats, rows: Sequence[LogprobRow]) -> list[TokenLogprobs]:
        """Return the log probabilities that are wanted of each of ``rows`` of raw ``logits`` [any, vocabulary]."""
        return row_logprobs(logits, rows, self._logprobs)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _choose_rows(self, logits: Floats, rows: Sequence[int], choices: Sequence[Choice], tokens: list[int]) -> None:
        """Choose the tokens of ``rows``, and write them to their places in ``tokens``."""
        if self._draw is not leave_all:
            self._choose_jointly(logits, rows, choices, tokens)
        for row in rows:
            if tokens[row] == LEFT:
                tokens[row] = choose_token(logits[row], choices[row], self._filter)

    def _choose_jointly(
        self, logits: Floats, rows: Sequence[int], choices: Sequence[Choice], tokens: list[int]
    ) -> None:
        """Write the tokens of those ``rows`` that can be chosen together."""
        drawn: list[Row] = []
        changes: list[tuple[int, Change]] = []
        try:
            for row in rows:
                choice = choices[row]
                filters = self._filters(choice.parameters)
                if filters is None or not _can_be_joint(choice):
                    continue
                if choice.changes_logits:
                    changes += [(row, change) for change in _change(logits[row], choice)]
                drawn.append(_row(row, choice, filters))
            if drawn:
                for drawn_row, token in zip(drawn, self._draw(logits, drawn), strict=True):
                    tokens[drawn_row.place] = token
        finally:
            for row, change in reversed(changes):
                change.undo(logits[row])

    def _filters(self, parameters: SamplingParams) -> Filters | None:
        """Return `joint_filters`, computed once for the parameters of a sequence."""
        known = self._known.get(id(parameters))
        # Another object may have got the id of one that is gone.
        if known is not None and known[0] is parameters:
            return known[1]
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        filters = joint_filters(parameters)
        self._known[id(parameters)] = parameters, filters
        return filters


def _row(place: int, choice: Choice, filters: Filters) -> Row:
    parameters, allowed = choice.parameters, choice.allowed
    mask = None if allowed is None else allowed.mask
    if parameters.greedy:
        return Row(place, mask, 0.0, math.inf, filters)
    threshold = parameters.xtc_threshold if draws_xtc(choice) else math.inf
    return Row(place, mask, uniform(parameters.seed, choice.position), threshold, filters)


def _can_be_joint(choice: Choice) -> bool:
    """Whether a mask says which tokens are allowed, if not all are, and some of them are sure to be left."""
    if choice.processed is not None:
        return False
    allowed = choice.allowed
    return allowed is None or (allowed.mask is not None and allowed.count > max(1, len(choice.barred)))


def _change(logits: Floats, choice: Choice) -> list[Change]:
    """Change ``logits`` [vocabulary] in place: add biases, apply penalties, rule out what is barred."""
    changes = [] if choice.biases is None else [choice.biases.apply(logits)]
    changes += [penalty.apply(logits) for penalty in choice.penalties]
    if choice.barred:
        barred = np.array([*choice.barred], np.intp)
        changes.append(Change(barred, logits[barred]))
        logits[barred] = -np.inf
    return changes
