"""The sequences that a shard of the simulation holds, and their cells."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from caravan_proto.messages.commands import Chunk, PrefixCopy, Row, SequenceParameters
from caravan_proto.messages.limits import LayoutLimits
from caravan_proto.messages.sampling import SamplingParams
from caravan_scheduler.events import ShardLimits
from caravan_testing.model_media import is_border, is_whole, tokens_of


@dataclass
class Held:
    """A sequence on a shard."""

    setup: SequenceParameters
    tokens: list[int] = field(default_factory=list)
    # A number for each cell; sequences that share a prefix have the same numbers.
    cells: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def pending(self) -> bool:
        """Whether the last token is sampled and not yet in a cell."""
        return len(self.tokens) > len(self.cells)

    def cut(self, length: int) -> None:
        assert 1 <= length <= len(self.cells), f"cut to {length} of {len(self.cells)}"
        del self.tokens[length:], self.cells[length:]


def ended_parameters(adapter: str) -> SequenceParameters:
    """Return the parameters of a sequence that gets no tokens."""
    return SequenceParameters(sampling=SamplingParams(), prompt_length=1, max_length=2, adapter=adapter)


class HeldCells:
    """The sequences of a shard by their ids, with their cells, in the layout that the shard has."""

    def __init__(self, limits: ShardLimits) -> None:
        self.limits = limits
        self.sequences: dict[int, Held] = {}
        self._numbers = itertools.count()
        # Whether no span of media may be cut.
        self.atomic = False

    @property
    def layout(self) -> LayoutLimits:
        return self.limits.layout

    @property
    def used(self) -> int:
        return self.count(self.sequences.values())

    def count(self, held: Iterable[Held]) -> int:
        """Return how many cells these sequences take together."""
        if not self.layout.shares_cells:
            return sum(len(one.cells) for one in held)
        return len({cell for one in held for cell in one.cells})

    def new(self, count: int) -> list[int]:
        """Return the numbers of so many new cells."""
        return list(itertools.islice(self._numbers, count))

    def copied(self, copy: PrefixCopy, own_id: int, setup: SequenceParameters, *, may_cut: bool = False) -> Held:
        """Make a sequence that begins with a prefix of another, or of what its own id held.

        ``may_cut``: its cells alone are needed.
        """
        source = self.sequences[copy.source_id]
        assert 1 <= copy.length <= len(source.cells), f"{copy.length} of {len(source.cells)} cells"
        assert may_cut or not self.layout.whole_only or copy.length == len(source.cells)
        assert source.setup.adapter == setup.adapter, "cells of another adapter"
        assert not self.atomic or is_border(source.tokens, copy.length), "copied part of a medium"
        cells = source.cells[: copy.length]
        if copy.source_id != own_id and not self.layout.shares_cells:
            cells = self.new(len(cells))
        return Held(setup, source.tokens[: copy.length], cells)

    def check_spans(self, part: Chunk | Row) -> None:
        """Fail if ``part`` has part of a medium that may not be cut."""
        tokens = tokens_of(part)
        for span in part.media if self.atomic else ():
            assert span.first == 0, "the rest of a medium"
            assert is_whole(tokens[span.offset : span.end]), "the beginning of a medium"

    def cut_back(self, starts: Iterable[Chunk | Row], taken_over: set[int]) -> None:
        """Cut the sequences back that a failed step was to take over: that cannot be undone."""
        for start in starts:
            if start.sequence_id in taken_over and start.copy is not None:
                self.sequences[start.sequence_id].cut(start.copy.length)
                self.sequences[start.sequence_id].ended = True

    def check_adapter(self, ids: Iterable[int]) -> None:
        """Fail unless a step with these sequences has one adapter."""
        adapters = {self.sequences[sequence_id].setup.adapter for sequence_id in ids}
        assert len(adapters) == 1, f"a step with the adapters {adapters}"

    def move(self, other: LayoutLimits, lost: Iterable[int]) -> None:
        """Move all sequences but ``lost`` to another layout."""
        self.limits = replace(self.limits, layout=other, other_layout=self.limits.layout)
        for sequence_id in lost:
            del self.sequences[sequence_id]
        for held in self.sequences.values():
            assert len(held.cells) <= other.cells_per_sequence, "moved to a layout that has no room for it"
            held.cells = self.new(len(held.cells))
        assert self.used <= other.cells
