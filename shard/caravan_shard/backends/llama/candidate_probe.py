"""Decides at the start whether llama.cpp finds the candidates of rows where it computes them.

That saves the way of all logits over the bus of a GPU, and costs sorting there. On CPUs there is no bus, so nothing is
timed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Protocol

import numpy as np

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import Backend, DecodeOutcome, StartupError, TokenBatch
from caravan_shard.backends.llama.devices import find_devices
from caravan_shard.config import ShardConfig
from caravan_shard.sampling.choice import Choice
from caravan_shard.sampling.joint_draw import LEFT
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sampling.top_candidates import candidates_needed, draw_from

_log = logging.getLogger(__name__)

_MOST_ROWS = 32
_STEPS = 12
_ROUNDS = 5
# The steps must be so much shorter that noise cannot decide.
_CLEAR = 0.95
_FILTERED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1)
_GREEDY = SamplingParams(temperature=0.0)


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
    found = CandidateProbe(backend).run(time=not asked)
    figures = {
        "rows": found.rows,
        "draws": found.draws,
        "unequal": found.unequal,
        "left": found.left,
        "ms_with": round(found.seconds_with * 1e3, 3),
        "ms_without": round(found.seconds_without * 1e3, 3),
    }
    if found.unequal:
        _log.warning("candidates are not used: other tokens were drawn from them than from all logits", extra=figures)
        return False
    used = asked or found.is_faster
    _log.info("candidates are used" if used else "candidates are not used: all logits are as fast", extra=figures)
    return used


class CandidateProbe:
    """Runs steps over a few sequences, which must be empty before and are empty afterwards."""

    def __init__(self, backend: CandidateBackend) -> None:
        self._backend = backend
        self._rows = min(_MOST_ROWS, backend.capacity.max_sequences)
        self._sampler = Sampler(backend.candidate_filter, 1, backend.joint_draw)
        self._random = np.random.default_rng(0)
        self._length = 0

    def run(self, *, time: bool, steps: int = _STEPS) -> ProbeResult:
        """Compare draws, and time steps if ``time``. Leaves the backend without candidates. Raises StartupError."""
        self._backend.find_candidates(patience=0)
        draws = unequal = left = 0
        for step in range(steps):
            self._wind(step)
            choices = self._choices()
            self._decode(choices, candidates=True)
            found = self._backend.candidates(self._rows)
            if found is None:
                raise StartupError("llama.cpp finds no candidates here: pass --backend-sampling off")
            drawn = draw_from(found.rows, choices, self._sampler)
            expected = self._sampler.choose(self._backend.logits(self._rows), choices)
            draws += len(drawn)
            left += drawn.count(LEFT)
            unequal += sum(one not in (LEFT, other) for one, other in zip(drawn, expected, strict=True))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(_ROUNDS if time else 0):
            for candidates in (True, False):
                self._forget()
                # The first step reserves graphs.
                seconds[candidates] += [self._timed(candidates=candidates) for _ in range(_STEPS + 1)][1:]
        self._forget()
        self._decode(self._choices(), candidates=False)
        self._forget()
        self._backend.leave_candidates()
        self._sampler.close()
        return ProbeResult(
            rows=self._rows,
            draws=draws,
            unequal=unequal,
            left=left,
            seconds_with=median(seconds[True] or [0.0]),
            seconds_without=median(seconds[False] or [0.0]),
        )

    def _timed(self, *, candidates: bool) -> float:
        choices = self._choices()
        started = perf_counter()
        self._decode(choices, candidates=candidates)
        found = self._backend.candidates(self._rows)
        if found is None:
            self._sampler.choose(self._backend.logits(self._rows), choices)
        else:
            draw_from(found.rows, choices, self._sampler)
        return perf_counter() - started

    def _choices(self) -> list[Choice]:
        """Return the choices of a step: each fourth row is greedy."""
        return [Choice(_GREEDY if row % 4 == 3 else _FILTERED, 100 * row + self._length) for row in range(self._rows)]

    def _decode(self, choices: Sequence[Choice], *, candidates: bool) -> None:
        """Compute one token of each sequence. Raises StartupError."""
        needed = np.array([candidates_needed(choice.parameters) for choice in choices], np.int32)
        batch = TokenBatch(
            self._random.integers(self._backend.facts.vocabulary_size, size=self._rows).astype(np.int32),
            np.full(self._rows, self._length, np.int32),
            np.arange(self._rows, dtype=np.int32),
            np.ones(self._rows, np.int8),
            candidates=needed if candidates else None,
        )
        outcome = self._backend.decode(batch)
        if outcome is not DecodeOutcome.OK:
            raise StartupError(f"a forward pass of the probe of candidates failed ({outcome.value})")
        self._length += 1

    def _wind(self, step: int) -> None:
        """Begin again after so many steps that a small context stays free."""
        if step % _STEPS == 0:
            self._forget()

    def _forget(self) -> None:
        for sequence_id in range(self._rows):
            self._backend.trim(sequence_id, 0)
        self._length = 0
