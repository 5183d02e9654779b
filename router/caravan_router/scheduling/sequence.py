"""A sequence through its life: waiting in the router, then resident on a shard, possibly several times."""

import math
from dataclasses import dataclass, field

from caravan_router.core.constraint import Constraint
from caravan_router.core.sampling import SamplingParams, StoppingParams
from caravan_router.core.tenant import ANYONE, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked for. ``request_id`` grows with arrival; ``prompt`` is not empty.

    ``priority``: higher goes first, and may take the place of lower ones. ``namespace``: prefixes are shared within it,
    by requests with the same ``adapter`` (empty: none). ``prompt_logprobs``: its prompt's are told, so all of it is
    computed.
    ``arrived_s``, and ``start_by_s`` and ``end_by_s``, after which it fails if it has not started or ended, are on the
    scheduler's clock.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    priority: int = 0
    tenant: Tenant = ANYONE
    namespace: str = ""
    constraint: Constraint | None = None
    adapter: str = ""
    prompt_logprobs: bool = False
    arrived_s: float = 0.0
    start_by_s: float = math.inf
    end_by_s: float = math.inf

    @property
    def prefix_namespace(self) -> str:
        """Within it equal tokens have equal cells."""
        # Neither part has a line break: no name makes one namespace another.
        return f"{self.adapter}\n{self.namespace}" if self.adapter else self.namespace

    @property
    def max_length(self) -> int:
        """Tokens of prompt and output together at which the sequence ends."""
        return len(self.prompt) + self.stopping.max_new_tokens

    @property
    def peak_cells(self) -> int:
        """Cells it holds at most: the last token is sampled, never computed."""
        return self.max_length - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTicket:
    """What a shard keeps of a sequence outside its cache: the cells of positions [start, length).

    ``target``: as of the resident that was swapped out.
    """

    shard: str
    handle: int
    start: int
    length: int
    target: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's growing list of tokens. Everything needed to compute it again anywhere is here."""

    request: Request
    output: list[int] = field(default_factory=list)
    # How often a younger request was let in while this one did not fit.
    bypassed: int = 0
    # How often it lost its cells by a failure since it last made progress.
    losses: int = 0
    started: bool = False
    # Its tenant was charged for the tokens before this position: computing them again costs nothing.
    charged: int = 0
    ticket: SwapTicket | None = None
    # Prompt tokens whose log probabilities were told.
    scored: int = 0
    # Tokens it has in common with others, by their request id, as found while waiting.
    common: dict[int, int] = field(default_factory=dict)

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def needs_scores(self) -> bool:
        """Its prompt has to be computed whole."""
        return self.request.prompt_logprobs and self.scored < len(self.request.prompt)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens at positions [start, stop)."""
        prompt = self.request.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        return (prompt + tuple(self.output))[start:stop]
