"""Drafts tokens with a second model."""

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from time import perf_counter
from typing import NamedTuple

import numpy as np

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Flags, Floats
from caravan_shard.backends.base import DecodeOutcome, DraftBlock, DraftModel, TokenBatch
from caravan_shard.media import NO_TOKEN
from caravan_shard.sampling.choice import Choice
from caravan_shard.sampling.penalties import LogitBiases, Penalty
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.speculation.step_costs import StepCosts

_log = logging.getLogger(__name__)

# A sequence that lacks at most this many tokens reads them in the step that drafts, others before it, in powers of 2.
READ_AT_ONCE = 16
# Steps of a token at the start, so that the cost of a step is known.
_FIRST_STEPS = 3
_MOST_FAILURES = 3
# Larger steps are measured only if their number of tokens is a power of 2, so that the table stays small.
_MEASURED = 64


class DraftInput(NamedTuple):
    """A sequence that gets a draft, all its tokens, and how the next one is chosen."""

    sequence_id: int
    tokens: Sequence[int]
    sampling: SamplingParams
    penalties: Sequence[Penalty]
    biases: LogitBiases | None = None


class ModelDrafter:
    """Drafts by a model whose cache holds beginnings of the main model's sequences.

    The cache may lose any of them at any time: they are computed again where a draft needs them. Tokens that it holds
    are always the first ones of the sequence, but for drafts while a step verifies them, and for those that a head of
    the main model cannot read any more: these count as held.

    ``costs``: seconds of the model's steps by their tokens; if it drafts blocks, by these, with what is read for each.
    ``reading``: those of steps that only read. ``seconds``: those of all steps together.
    """

    def __init__(self, model: DraftModel, sampler: Sampler, vocabulary_size: int) -> None:
        """``vocabulary_size``: that of the main model."""
        self._model = model
        self._sampler = sampler
        self._vocabulary_size = vocabulary_size
        # Number of tokens held by sequence id. The ids that drafted last come last.
        self._held: dict[int, int] = {}
        self._failures = 0
        self.costs = self.reading = StepCosts()
        self.seconds = 0.0
        self._growth = READ_AT_ONCE + (READ_AT_ONCE if model.block is None else max(READ_AT_ONCE, model.block.rows))
        for count in (1, _FIRST_STEPS):
            # The first step of all takes longer.
            self._measure(count)

    def _measure(self, steps: int) -> None:
        """Learn anew what steps cost, from so many."""
        self.costs = StepCosts()
        self.reading = StepCosts() if self.drafts_blocks else self.costs
        # Some heads do not read the first token of a sequence.
        tokens = [0] * (self._model.readable(0).start + (2 if self.drafts_blocks else 1))
        asked = [DraftInput(0, tokens, SamplingParams(temperature=0.0), ())]
        for _ in range(steps if self.drafts_blocks else 1):
            self.read_up_to(0, tokens, 1)
            self.propose(asked, [1 if self.drafts_blocks else steps])
            self.keep(0, 0)

    @property
    def drafts_blocks(self) -> bool:
        """Whether a step drafts several tokens of a sequence."""
        return self._model.block is not None

    @property
    def at_once(self) -> int:
        """Most tokens of a draft that a step makes."""
        return 1 if self._model.block is None else self._model.block.most

    def cells(self, length: int, drafted: int) -> int:
        """Return the cells of a sequence of ``length`` tokens while so many are drafted."""
        block = self._model.block
        return length + drafted if block is None else length - 1 + block.rows

    def most(self, length: int) -> int:
        """Return how many tokens may be drafted for one of ``length``; none once the model has failed too often."""
        if self._failures >= _MOST_FAILURES:
            return 0
        block, longest = self._model.block, self._model.capacity.current.cells_per_sequence
        if block is None:
            return longest - length
        return block.most if self.cells(length, block.most) <= longest else 0

    def missing(self, sequence_id: int, tokens: Sequence[int]) -> int:
        """Return how many of ``tokens`` the model has not read."""
        return len(tokens) - self._start(sequence_id)

    def keep_draft(self, sequence_id: int, length: int, drafted: int) -> None:
        """Hold ``length`` tokens of a sequence, and ``drafted`` ones behind them if they are of use afterwards."""
        self.keep(sequence_id, length + drafted if self._model.keeps_drafts else length)

    def keep(self, sequence_id: int, length: int) -> None:
        """Hold no more than ``length`` tokens of a sequence."""
        if self._held.get(sequence_id, 0) <= length:
            return
        if length > 0 and self._model.trim(sequence_id, length):
            self._held[sequence_id] = length
        else:
            self._model.trim(sequence_id, 0)
            del self._held[sequence_id]

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Let a sequence of which nothing is held start with ``length`` tokens of another, or with those held."""
        length = min(length, self._held.get(source_id, 0))
        if length > 0:
            self._model.copy(source_id, destination_id, length)
            self._held[destination_id] = length

    def has_room(self, sequence_id: int, length: int, kept: Collection[int]) -> bool:
        """Whether ``length`` tokens of a sequence fit. Drops others for them, but for the ids ``kept``."""
        held = sum(self._held.values()) - self._held.get(sequence_id, 0)
        excess = length + held + len(kept) * self._growth - self._model.capacity.current.cells
        if excess <= 0:
            # As nearly always. Each step asks for each sequence.
            return True
        for key in [key for key in self._held if key != sequence_id and key not in kept]:
            excess -= self._held[key]
            self.keep(key, 0)
            if excess <= 0:
                return True
        return False

    def can_read(self, sequence_id: int, tokens: Sequence[int]) -> bool:
        """Whether the model has the tokens that it is missing. The main model may have a few more, and sees media."""
        if len(tokens) > self._model.readable(sequence_id).stop:
            return False
        missing = tokens[self._start(sequence_id) :]
        return NO_TOKEN not in missing and max(missing, default=0) < self._model.facts.vocabulary_size

    def read_up_to(self, sequence_id: int, tokens: Sequence[int], rest: int) -> bool:
        """Read ``tokens`` but for at most ``rest`` of them, at least 1; False if a step fails."""
        while (missing := self.missing(sequence_id, tokens)) > rest:
            if not self.read(sequence_id, tokens, missing):
                return False
        return True

    def read(self, sequence_id: int, tokens: Sequence[int], most: int) -> bool:
        """Read the next ones of ``tokens``: at most ``most``, and not the last one, after which a draft begins.

        False if the step fails.
        """
        began = perf_counter()
        held = self._start(sequence_id)
        room = min(most, len(tokens) - held - 1, self._model.capacity.max_batch_tokens)
        count = 1 << room.bit_length() - 1
        if not self._decode([sequence_id], [tokens[held : held + count]], has_outputs=False):
            return False
        self._observe(self.reading, count, began)
        return True

    def propose(self, asked: Sequence[DraftInput], counts: Sequence[int]) -> list[list[int]]:
        """Return so many tokens for each sequence, at least one, or none if a step fails.

        ``asked`` are in ascending order of id.
        """
        ids = [one.sequence_id for one in asked]
        most = self._model.capacity.max_batch_tokens // len(ids)
        for one in asked:
            # A draft begins behind a token that is computed.
            self.keep(one.sequence_id, len(one.tokens) - 1)
            if not self.read_up_to(one.sequence_id, one.tokens, most):
                return [[] for _ in asked]
        if self._model.block is not None:
            return self._propose_blocks(asked, counts, self._model.block)
        drafts: list[list[int]] = [[] for _ in asked]
        new = [one.tokens[self._start(one.sequence_id) :] for one in asked]
        for place in range(max(counts)):
            going = [index for index, count in enumerate(counts) if count > place]
            if place:
                new = [drafts[index][-1:] for index in going]
            began = perf_counter()
            if not self._decode([ids[index] for index in going], new):
                return [[] for _ in asked]
            choices = [_choice(asked[index], place) for index in going]
            chosen = self._sampler.choose(self._logits(len(going)), choices)
            self._observe(self.costs, sum(map(len, new)), began)
            for index, token in zip(going, chosen, strict=True):
                drafts[index].append(token)
        return drafts

    def _propose_blocks(self, asked: Sequence[DraftInput], counts: Sequence[int], block: DraftBlock) -> list[list[int]]:
        """Return the first ``counts`` tokens of blocks, which are whole: what one has first depends on all its rows."""
        began = perf_counter()
        new = [(one.sequence_id, one.tokens[self._start(one.sequence_id) : -1]) for one in asked]
        new = [(sequence_id, tokens) for sequence_id, tokens in new if tokens]
        if new and not self._decode(*zip(*new, strict=True), has_outputs=False):
            return [[] for _ in asked]
        drafts: list[list[int]] = []
        most = self._model.capacity.max_batch_tokens // block.rows
        for first in range(0, len(asked), most):
            part = asked[first : first + most]
            starts = {one.sequence_id: len(one.tokens) - 1 for one in part}
            rows = [[one.tokens[-1], *[block.unknown] * (block.rows - 1)] for one in part]
            if not self._compute(starts, rows, np.ones(len(part) * block.rows, np.int8)):
                return [[] for _ in asked]
            self._held |= starts
            wanted = counts[first : first + most]
            places = [
                number * block.rows + block.first + place
                for number, count in enumerate(wanted)
                for place in range(count)
            ]
            choices = [_choice(one, place) for one, count in zip(part, wanted, strict=True) for place in range(count)]
            chosen = iter(self._sampler.choose(self._logits(len(part) * block.rows)[places], choices))
            drafts += [list(islice(chosen, count)) for count in wanted]
        self._observe(self.costs, len(asked), began)
        return drafts

    def _start(self, sequence_id: int) -> int:
        """Return the position of the token that the model reads next."""
        return max(self._held.get(sequence_id, 0), self._model.readable(sequence_id).start)

    def _logits(self, rows: int) -> Floats:
        """Return [rows, vocabulary] of the main model, which never chooses tokens that the draft model lacks."""
        logits = self._model.logits(rows)[:, : self._vocabulary_size]
        lacking = self._vocabulary_size - logits.shape[1]
        return np.pad(logits, ((0, 0), (0, lacking)), constant_values=-np.inf) if lacking else logits

    def _decode(self, ids: Sequence[int], new: Sequence[Sequence[int]], *, has_outputs: bool = True) -> bool:
        """Compute ``new`` tokens of each sequence. If that fails, nothing is held of them."""
        counts = [len(tokens) for tokens in new]
        starts = {sequence_id: self._start(sequence_id) for sequence_id in ids}
        outputs = np.zeros(sum(counts), np.int8)
        outputs[np.cumsum(counts) - 1] = has_outputs
        if not self._compute(starts, new, outputs):
            return False
        self._held |= {key: at + count for (key, at), count in zip(starts.items(), counts, strict=True)}
        return True

    def _compute(self, starts: Mapping[int, int], new: Sequence[Sequence[int]], outputs: Flags) -> bool:
        """Compute ``new`` tokens of each sequence, from where it ``starts``. If that fails, nothing is held of them.

        Whether or not, none counts as held yet.
        """
        counts = [len(tokens) for tokens in new]
        for sequence_id in starts:
            self._held.pop(sequence_id, None)
        outcome = self._model.decode(
            TokenBatch(
                np.concatenate([np.array(tokens, np.int32) for tokens in new]),
                np.concatenate(
                    [
                        np.arange(at, at + count, dtype=np.int32)
                        for at, count in zip(starts.values(), counts, strict=True)
                    ]
                ),
                np.repeat(np.array(list(starts), np.int32), counts),
                outputs,
            )
        )
        if outcome is DecodeOutcome.OK:
            self._failures = 0
            return True
        self._failures += 1
        for sequence_id in starts:
            self._model.trim(sequence_id, 0)
        _log.error("a step of the draft model failed", extra={"outcome": outcome.value, "in_a_row": self._failures})
        return False

    def _observe(self, costs: StepCosts, size: int, began: float) -> None:
        seconds = perf_counter() - began
        self.seconds += seconds
        if size <= _MEASURED or size.bit_count() == 1:
            costs.observe(size, seconds)


def _choice(asked: DraftInput, place: int) -> Choice:
    """Return how the token at ``place`` of a draft is chosen: as that of the sequence at its position would be."""
    return Choice(asked.sampling, len(asked.tokens) + place, asked.penalties, biases=asked.biases)
