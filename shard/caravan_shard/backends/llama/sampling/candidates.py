"""Lets llama.cpp find the highest logits of rows where it computes them, so that the others stay there.

That saves the way of all logits over the bus of a GPU, and costs sorting there, so a probe at the start decides whether
it is done. On CPUs there is no bus, so nothing is timed.

Each id of a sequence has a chain of llama.cpp's samplers, with the filter top_k and nothing else, while the sequences
that had the id lately needed no more. Another chain for any id makes llama.cpp reserve its graphs again, which takes as
long as some steps. So an id keeps its chain from one sequence to the next, and with too many candidates; it loses the
chain at once where all logits are needed, and gets one only after some steps that would have used it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Ids
from caravan_shard.backends.base import Backend, DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.devices.devices import find_devices
from caravan_shard.config import ShardConfig
from caravan_shard.sampling.choice import Choice
from caravan_shard.sampling.joint_draw import LEFT
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sampling.top_candidates import TopCandidates, candidate_class, candidates_needed, draw_from
from caravan_shard.startup_error import StartupError

# Steps of an id that would have used candidates before it gets its chain.
PATIENCE = 8

_log = logging.getLogger(__name__)

_MOST_ROWS = 32
_STEPS = 24
_ROUNDS = 5
# The steps must be so much shorter that noise cannot decide.
_CLEAR = 0.95
_FILTERED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_CHAINS = (*(SamplingParams(**_FILTERED, seed=seed) for seed in (1, 2, 3)), SamplingParams(temperature=0.0))


class DeviceCandidates:
    """The chains of one context."""

    def __init__(self, context: Any, vocabulary_size: int, patience: int = PATIENCE) -> None:
        self._context = context
        self._vocabulary_size = vocabulary_size
        self._patience = patience
        self._chains: dict[int, tuple[int, Any]] = {}
        self._waited: dict[int, int] = {}
        # llama.cpp recognises a chain by its address, which must stay taken until it has built another graph.
        self._retired: list[Any] = []
        self._rows = np.empty(0, np.int32)
        self.changes = 0

    def prepare(self, batch: TokenBatch) -> None:
        """Set the chains for a forward pass."""
        self._rows = batch.sequence_ids[batch.outputs != 0]
        needed = np.zeros(len(self._rows), np.int32) if batch.candidates is None else batch.candidates
        wanted: dict[int, int] = {}
        for sequence_id, count in zip(self._rows.tolist(), needed.tolist(), strict=True):
            # llama.cpp lets a sequence with a chain have one output.
            wanted[sequence_id] = 0 if sequence_id in wanted else count
        ready = False
        for sequence_id, count in wanted.items():
            has = self._chains[sequence_id][0] if sequence_id in self._chains else 0
            if count == 0:
                self._waited.pop(sequence_id, None)
                if has:
                    self._set(sequence_id, 0)
            elif has == 0:
                self._waited[sequence_id] = self._waited.get(sequence_id, 0) + 1
                ready = ready or self._waited[sequence_id] > self._patience
            elif has < min(count, self._vocabulary_size):
                self._set(sequence_id, count)
        if ready:
            # All that wait, so that the graphs are reserved once.
            for sequence_id in [one for one in wanted if one in self._waited]:
                self._set(sequence_id, wanted[sequence_id])

    @property
    def count(self) -> int:
        """Outputs of the last forward pass that have candidates only."""
        return sum(not self.has_logits(row) for row in range(len(self._rows)))

    def free_retired(self) -> None:
        """Free the chains that no graph has any more, after a forward pass."""
        for chain in self._retired:
            llama_cpp.llama_sampler_free(chain)
        self._retired.clear()

    def has_logits(self, row: int) -> bool:
        """Whether all logits of a row are there."""
        return int(self._rows[row]) not in self._chains

    def of_row(self, row: int) -> TopCandidates | None:
        """Return the candidates of a row of the last forward pass; None where all logits are there instead."""
        if self.has_logits(row):
            return None
        index = row - len(self._rows)  # from the end, as outputs are counted, and not tokens
        count = int(llama_cpp.llama_get_sampled_candidates_count_ith(self._context, index))
        assert count > 1, f"llama.cpp found {count} candidates"
        ids = llama_cpp.llama_get_sampled_candidates_ith(self._context, index)
        logits = llama_cpp.llama_get_sampled_logits_ith(self._context, index)
        return TopCandidates(_copied(ids, count), _copied(logits, count), whole=count == self._vocabulary_size)

    def close(self) -> None:
        """Free the chains. The context must be gone if it has any."""
        self.free_retired()
        for _, chain in self._chains.values():
            llama_cpp.llama_sampler_free(chain)
        self._chains.clear()

    def _set(self, sequence_id: int, needed: int) -> None:
        self.changes += 1
        self._waited.pop(sequence_id, None)
        old = self._chains.pop(sequence_id, None)
        if old is not None:
            self._retired.append(old[1])
        if needed == 0:
            llama_cpp.llama_set_sampler(self._context, sequence_id, None)
            return
        size = min(candidate_class(needed), self._vocabulary_size)
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_k(size))
        if llama_cpp.llama_set_sampler(self._context, sequence_id, chain):
            self._chains[sequence_id] = size, chain
        else:
            self._retired.append(chain)


def _copied(pointer: Any, count: int) -> NDArray[Any]:
    return np.ctypeslib.as_array(pointer, (count,)).copy()


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
