"""Decides at the start whether llama.cpp finds the candidates of rows where it computes them.

That saves the way of all logits over the bus of a GPU, and costs sorting there. On CPUs there is no bus, so nothing is
timed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Ids
from caravan_shard.backends.base import Backend, DecodeOutcome, StartupError, TokenBatch
from caravan_shard.backends.llama.devices import find_devices
from caravan_shard.config import ShardConfig
from caravan_shard.sampling.choice import Choice
from caravan_shard.sampling.joint_draw import LEFT
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sampling.top_candidates import candidates_needed, draw_from

_log = logging.getLogger(__name__)

_MOST_ROWS = 32
_STEPS = 24
_ROUNDS = 5
# The steps must be so much shorter that noise cannot decide.
_CLEAR = 0.95
_FILTERED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_CHAINS = (*(SamplingParams(**_FILTERED, seed=seed) for seed in (1, 2, 3)), SamplingParams(temperature=0.0))


class CandidateBackend(Backend, Protocol):
    """A backend that can find candidates."""

    def find_candidates(self, patience: int = ...) -> None: ...

    def leave_candidates(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """``seconds`` of a step with candidates and with all logits, draws included; medians. ``rows``: rows of a step.

    ``draws``: how many tokens were drawn in both ways. ``unequal``: how many of them differed. ``left``: how many rows
    needed all logits after all.
    """

    rows: int
    draws: int
    unequal: int
    left: int
    seconds_with: float
    seconds_without: float

    @property
    def is_faster(self) -> bool:
        """Whether candidates are clearly faster."""
        return self.seconds_with <= _CLEAR * self.seconds_without


def chooses_candidates(config: ShardConfig, backend: CandidateBackend) -> bool:
    """Return whether candidates are to be used, as the flag says and a probe finds."""
    if config.backend_sampling == "off":
        return False
    asked = config.backend_sampling == "on"
    if not asked and not (config.uses_gpus and find_devices()):
        return False
    if config.split_mode == "tensor":
        if asked:
            _log.warning("candidates cannot be found on GPUs that share tensors: --backend-sampling has no effect")
        return False
    found = CandidateProbe(backend).run(1 if asked else _ROUNDS)
    figures = {
        "rows": found.rows,
        "draws": found.draws,
        "unequal": found.unequal,
        "left": found.left,
        "ms_with": round(found.seconds_with * 1e3, 3),
        "ms_without": round(found.seconds_without * 1e3, 3),
    }
    if found.unequal:
        _log.warning(
            "candidates are not used: sampling from them gave other tokens than sampling from all logits", extra=figures
        )
        return False
    used = asked or found.is_faster
    _log.info("candidates are used" if used else "candidates are not used: all logits are as fast", extra=figures)
    return used


class CandidateProbe:
    """Runs steps over a few sequences, which must be empty before and are empty afterwards."""

    def __init__(self, backend: CandidateBackend) -> None:
        self._backend = backend
        capacity = backend.capacity
        self._rows = max(1, min(_MOST_ROWS, capacity.max_sequences, capacity.current.cells // _STEPS))
        self._sampler = Sampler(backend.candidate_filter, 1, backend.joint_draw)

    @property
    def draws_of_a_round(self) -> int:
        """How many tokens a round draws in each way."""
        return self._rows * _STEPS

    def run(self, rounds: int) -> ProbeResult:
        """Run the same steps with candidates and without. Leaves the backend without them. Raises StartupError."""
        self._backend.find_candidates(patience=0)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        draws = unequal = left = 0
        for number in range(rounds):
            tokens = {candidates: self._round(number, seconds[candidates], candidates) for candidates in (True, False)}
            draws += len(tokens[True])
            left += tokens[True].count(LEFT)
            unequal += sum(one not in (LEFT, two) for one, two in zip(tokens[True], tokens[False], strict=True))
        self._forget()
        self._backend.leave_candidates()
        self._sampler.close()
        return ProbeResult(
            rows=self._rows,
            draws=draws,
            unequal=unequal,
            left=left,
            seconds_with=median(seconds[True]),
            seconds_without=median(seconds[False]),
        )

    def _round(self, number: int, seconds: list[float], candidates: bool) -> list[int]:
        """Return the tokens that are drawn, and add the seconds of each step but the first, which reserves graphs."""
        self._forget()
        random = np.random.default_rng(number)
        drawn: list[int] = []
        for step in range(_STEPS):
            given = random.integers(self._backend.facts.vocabulary_size, size=self._rows).astype(np.int32)
            choices = [Choice(_CHAINS[row % len(_CHAINS)], _STEPS * number + step) for row in range(self._rows)]
            started = perf_counter()
            drawn += self._step(given, step, choices, candidates=candidates)
            if step:
                seconds.append(perf_counter() - started)
        return drawn

    def _step(self, given: Ids, position: int, choices: Sequence[Choice], *, candidates: bool) -> list[int]:
        needed = np.array([candidates_needed(choice.parameters) for choice in choices], np.int32)
        batch = TokenBatch(
            given,
            np.full(self._rows, position, np.int32),
            np.arange(self._rows, dtype=np.int32),
            np.ones(self._rows, np.int8),
            candidates=needed if candidates else None,
        )
        outcome = self._backend.decode(batch)
        found = self._backend.candidates(self._rows) if outcome is DecodeOutcome.OK else None
        if outcome is not DecodeOutcome.OK or (found is None) is candidates:
            raise StartupError(f"llama.cpp finds no candidates ({outcome.value}): pass --backend-sampling off")
        if found is None:
            return self._sampler.choose(self._backend.logits(self._rows), choices)
        return draw_from(found.rows, choices, self._sampler)

    def _forget(self) -> None:
        for sequence_id in range(self._rows):
            self._backend.trim(sequence_id, 0)
