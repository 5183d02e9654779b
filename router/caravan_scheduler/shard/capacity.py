"""What an empty shard has room for, in the layouts of its cache."""

import math
from dataclasses import replace

from caravan_proto.messages.limits import LayoutLimits
from caravan_scheduler.beams import BeamGroup
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.prompt_media import PromptMedia
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.resident import Resident

# Cells that a sequence should be able to take after it starts. With fewer, the layout might have to change at once.
_GROWTH_CELLS = 8


def fits_for_now(sequence: Sequence, layout: LayoutLimits) -> bool:
    """Whether ``sequence`` fits ``layout`` until it has grown by some tokens, or has ended."""
    return min(sequence.known_tokens + _GROWTH_CELLS, sequence.request.peak_cells) <= layout.cells_per_sequence


class ShardCapacity:
    """``most_residents``: how many sequences may start or run at once.

    ``layout_set_s``: when the layout was changed last, in seconds on the scheduler's clock.
    """

    def __init__(self, limits: ShardLimits, config: SchedulerConfig) -> None:
        self.limits = limits
        self.most_residents = config.max_batch_size or limits.max_sequences
        self.layout_set_s = -math.inf
        self._most_cells = config.max_batch_total_tokens

    @property
    def cells(self) -> int:
        """Cells of all sequences together."""
        return min(self.limits.layout.cells, self._most_cells or self.limits.layout.cells)

    @property
    def most_running(self) -> int:
        """How many sequences may run at once."""
        return min(self.limits.max_sequences, self.most_residents)

    @property
    def is_bounded_by_sequence(self) -> bool:
        """Whether each sequence has cells of its own, so that there is nothing to share out."""
        return not self.limits.layout.shares_cells and self.cells == self.limits.layout.cells

    def could_ever_hold(self, sequence: Sequence) -> bool:
        """Whether the empty shard has room for ``sequence``, in one of its layouts."""
        peak = sequence.request.peak_cells
        if sequence.spec.media is not None and not self._takes(sequence, sequence.spec.media):
            return False
        if (group := sequence.group) is not None:
            return peak <= self.limits.most_cells_per_sequence and self._could_ever_hold_beams(group)
        return peak <= self.limits.most_cells_per_sequence and peak <= self.cells

    def _takes(self, sequence: Sequence, media: PromptMedia) -> bool:
        """Whether the shard has the projector that ``media`` were counted for, and room for their spans in a step."""
        if media.encoder != self.limits.encoder:
            return False
        most = self.limits.max_batch_tokens
        if sequence.spec.prompt_logprobs:
            most = min(most, self.limits.max_prompt_logprob_tokens)
        return not media.atomic or media.largest <= most

    def _could_ever_hold_beams(self, group: BeamGroup[Sequence]) -> bool:
        if group.width > min(self.limits.max_sequences, self.most_residents, self.limits.max_batch_tokens):
            return False
        prompt_copies = 1 if self.limits.layout.shares_cells and not self.limits.layout.whole_only else group.width
        return prompt_copies * len(group.leader.spec.prompt) + group.most_output_cells <= self.cells

    def could_hold_now(self, sequence: Sequence) -> bool:
        """Whether the empty shard has room for ``sequence`` in its current layout, for now."""
        return self.could_ever_hold(sequence) and fits_for_now(sequence, self.limits.layout)

    def could_outgrow(self, resident: Resident) -> bool:
        """Whether ``resident`` may get longer than the current layout allows."""
        return resident.peak_cells > self.limits.layout.cells_per_sequence

    def note_run_fingerprint(self, run_fingerprint: str) -> None:
        """Note which saved runs the shard can fetch, which it does not know at its start."""
        self.limits = replace(self.limits, run_fingerprint=run_fingerprint)

    def set_layout(self, layout: LayoutLimits, now_s: float) -> None:
        """Note which layout the cache has after it was to change. A shard that could not change would fail again."""
        before = self.limits
        changed = layout.shares_cells != before.layout.shares_cells
        self.limits = replace(before, layout=layout, other_layout=before.layout if changed else None)
        self.layout_set_s = now_s
