"""A command that was sent to a shard and has not ended."""

from collections.abc import Iterable

from caravan_router.scheduling.actions import Command, Decode, Evaluate, Prefill
from caravan_router.scheduling.shard.resident import Resident

# A Decode that must yield has seldom run more than this many steps beyond those reported. If it has, the shard reports
# that its cache is full, and nothing is lost.
UNSEEN_STEPS = 4


class InFlight:
    """A command under way.

    ``residents``: those the command names, by sequence id. An id may belong to another before late results arrive.
    ``chunk_tokens``: tokens of chunks and rows, by sequence id. ``steps_left``: steps not reported yet.
    ``drafts``: most draft tokens of a step. ``cells_left``: what a Decode may take beyond what was reported, in all.
    """

    __slots__ = ("cells_left", "chunk_tokens", "command", "drafts", "residents", "steps_left")

    def __init__(self, command: Command, residents: Iterable[Resident]) -> None:
        self.command = command
        self.residents = {resident.sequence_id: resident for resident in residents}
        self.chunk_tokens: dict[int, int] = {}
        self.steps_left = 0
        self.drafts = self.cells_left = 0
        if isinstance(command, Prefill):
            self.chunk_tokens = {chunk.sequence_id: len(chunk.token_ids) for chunk in command.chunks}
            self.steps_left = 1
        elif isinstance(command, Evaluate):
            self.chunk_tokens = {row.sequence_id: len(row.token_ids) for row in command.rows}
            self.steps_left = 1
        elif isinstance(command, Decode):
            self.steps_left = command.max_steps
            self.drafts = command.max_draft_tokens
            self.cells_left = len(self.residents) * command.max_steps

    @property
    def is_decode(self) -> bool:
        """Whether it yields to the next command: only a Decode does."""
        return isinstance(self.command, Decode)

    @property
    def starting(self) -> list[Resident]:
        """Residents whose first chunk it carries."""
        if isinstance(self.command, Evaluate):
            return [self.residents[row.sequence_id] for row in self.command.rows if row.is_first]
        if not isinstance(self.command, Prefill):
            return []
        return [self.residents[chunk.sequence_id] for chunk in self.command.chunks if chunk.setup is not None]

    @property
    def coming_cells(self) -> int:
        """Cells that its decodes may take before the next command runs."""
        if self.drafts:
            return min(self.cells_left, (len(self.residents) + self.drafts) * UNSEEN_STEPS) if self.steps_left else 0
        return (len(self.residents) - len(self.chunk_tokens)) * min(self.steps_left, UNSEEN_STEPS)

    def unseen_tokens(self, resident: Resident) -> int:
        """Return how many tokens of ``resident`` may be under way: those of its chunk, or of steps not reported yet."""
        chunk = self.chunk_tokens.get(resident.sequence_id)
        if chunk is not None:
            return chunk
        return UNSEEN_STEPS * (1 + min(self.drafts, resident.sequence.spec.max_draft_tokens))

    def fail(self) -> None:
        """Note that its step changed nothing."""
        self.chunk_tokens = {}
        self.steps_left = 0

    def completes_prefill(self, prefilling: Iterable[Resident]) -> bool:
        """Whether no prompt of ``prefilling`` is left to compute after it."""
        if not self.chunk_tokens:
            return False
        chunk_tokens = self.chunk_tokens if self.steps_left else {}  # else they are computed
        return all(
            resident.computed + chunk_tokens.get(resident.sequence_id, 0) >= resident.target for resident in prefilling
        )
