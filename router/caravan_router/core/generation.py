"""One sequence to generate."""

import math
from dataclasses import dataclass
from enum import Enum

from caravan_router.core.constraint import Constraint
from caravan_router.core.sampling import SamplingParams, StoppingParams
from caravan_router.core.tenant import ANYONE, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """One sequence to generate: non-empty ``prompt`` of token ids; with the new tokens it fits a shard.

    Specs with the same prompt and ``namespace`` that are submitted together compute the prompt once. ``constraint``:
    one that `Queries.compile_constraint` found no problem with. ``adapter``: one of `ModelFacts.adapters`, or empty.
    ``timeout_s``: from submission to the last token.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    priority: int = 0
    tenant: Tenant = ANYONE
    namespace: str = ""
    constraint: Constraint | None = None
    adapter: str = ""
    prompt_logprobs: bool = False
    timeout_s: float = math.inf

    @property
    def max_length(self) -> int:
        """Number of tokens, prompt and output together, at which the sequence ends."""
        return len(self.prompt) + self.stopping.max_new_tokens


class GenerationState(Enum):
    """Where a generation is: it waits (``queued``), its prompt is computed (``prefilling``), it gets tokens
    (``running``), it gave its place to others and continues later from what was saved (``swapped``), or it has all its
    tokens (``ended``).
    """

    QUEUED = "queued"
    PREFILLING = "prefilling"
    RUNNING = "running"
    SWAPPED = "swapped"
    ENDED = "ended"
