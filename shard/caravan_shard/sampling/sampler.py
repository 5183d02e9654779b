"""Chooses the next token of each row of logits, of rows together where that is possible."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.sampling.choice import Choice, choose_token, draws_xtc
from caravan_shard.sampling.draw import uniform
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.sampling.joint_draw import LEFT, Filters, JointDraw, Row, joint_filters, leave_all
from caravan_shard.sampling.token_candidates import CandidateFilter

# Rows whose logits are changed, by penalties and the like, are copied in groups of so many, which a core's cache holds.
_COPIED = 8
# So many parameters of sequences are remembered.
_MOST_KNOWN = 1024


class Sampler:
    """Chooses a token for each row of a step; with ``threads`` > 1 they share rows that need more than an argmax."""

    def __init__(
        self, candidate_filter: CandidateFilter, threads: int, joint_draw: JointDraw = leave_all
    ) -> None:
        self._draw = joint_draw
        self._filter = candidate_filter
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "sampling") if threads > 1 else None
        self._local = threading.local()
        self._known: dict[int, tuple[SamplingParams, Filters | None]] = {}

    def choose(self, logits: Floats, choices: Sequence[Choice]) -> list[int]:
        """Return one token for each row of ``logits`` [rows, vocabulary]."""
        costly = [row for row, choice in enumerate(choices) if not choice.parameters.greedy or choice.changes_logits]
        if not costly:
            greedy: list[int] = logits.argmax(axis=1).tolist()
            return greedy
        tokens = [LEFT] * len(choices)
        for row in set(range(len(choices))).difference(costly):
            tokens[row] = int(logits[row].argmax())
        if self._pool is None or len(costly) == 1:
            self._choose_rows(logits, costly, choices, tokens)
            return tokens
        parts = [costly[start :: self._threads] for start in range(self._threads)]
        for _ in self._pool.map(lambda part: self._choose_rows(logits, part, choices, tokens), parts):
            pass
        return tokens

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _choose_rows(
        self, logits: Floats, rows: Sequence[int], choices: Sequence[Choice], tokens: list[int]
    ) -> None:
        """Choose the tokens of ``rows``, and write them to their places in ``tokens``."""
        joint, copied = [], []
        for row in rows:
            choice = choices[row]
            parameters = choice.parameters
            if choice.processed is not None or (choice.allowed is not None and choice.allowed.count == 1):
                continue
            if parameters.greedy:
                copied.append(row)
            elif self._filters(parameters) is not None:
                (copied if choice.changes_logits else joint).append(row)
        self._draw_jointly(logits, joint, joint, choices, tokens)
        for start in range(0, len(copied), _COPIED):
            self._choose_copied(logits, copied[start : start + _COPIED], choices, tokens)
        for row in rows:
            if tokens[row] == LEFT:
                tokens[row] = choose_token(logits[row], choices[row], self._filter)

    def _choose_copied(
        self, logits: Floats, rows: Sequence[int], choices: Sequence[Choice], tokens: list[int]
    ) -> None:
        copies = self._copies(logits.shape[1])
        places, drawn = [], []
        for place, row in enumerate(rows):
            choice, copy = choices[row], copies[place]
            if not _change(logits[row], choice, copy):
                continue
            if not choice.parameters.greedy:
                places.append(place)
                drawn.append(row)
                continue
            token = int(copy.argmax())
            # Where no allowed token has a number, the first allowed one is chosen, alone.
            if copy[token] > -np.inf:
                tokens[row] = token
        self._draw_jointly(copies, places, drawn, choices, tokens)

    def _draw_jointly(
        self,
        logits: Floats,
        places: Sequence[int],
        rows: Sequence[int],
        choices: Sequence[Choice],
        tokens: list[int],
    ) -> None:
        """Draw the tokens of ``rows``, whose logits are at ``places``; LEFT where that is not possible."""
        drawn = []
        for place, row in zip(places, rows, strict=True):
            choice = choices[row]
            parameters = choice.parameters
            filters = self._filters(parameters)
            assert filters is not None, "not drawn jointly"
            threshold = parameters.xtc_threshold if draws_xtc(choice) else math.inf
            drawn.append(Row(place, uniform(parameters.seed, choice.position), threshold, filters))
        if drawn:
            for row, token in zip(rows, self._draw(logits, drawn), strict=True):
                tokens[row] = token

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

    def _copies(self, size: int) -> Floats:
        """Return this thread's own room for rows of this size."""
        copies: Floats | None = getattr(self._local, "copies", None)
        if copies is None or copies.shape[1] != size:
            copies = self._local.copies = np.empty((_COPIED, size), np.float32)
        return copies


def _change(logits: Floats, choice: Choice, out: Floats) -> bool:
    """Write ``logits`` [vocabulary] to ``out`` with what the choice changes; return whether it is sure a token is left.

    Tokens that are not allowed or barred are -inf.
    """
    np.copyto(out, logits)
    if choice.biases is not None:
        choice.biases.apply(out)
    for penalty in choice.penalties:
        penalty.apply(out)
    allowed, barred = choice.allowed, choice.barred
    if allowed is not None:
        allowed.hide_others(out, out)
    if barred:
        if allowed is not None and allowed.count <= len(barred):
            return False
        out[[*barred]] = -np.inf
    return True
