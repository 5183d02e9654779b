"""The description of a generation, and its stages. Values are valid: the API checks them, and nothing else does."""

import math
from dataclasses import dataclass
from enum import Enum

from caravan_proto.messages.constraint import Constraint, Thought
from caravan_proto.messages.sampling import SamplingParams
from caravan_scheduler.core.prompt_media import PromptMedia


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """When a sequence ends on the shard. Stop strings are text: the text layer looks for them.

    ``stop_token_ids``: at most `caravan_proto.limits.MAX_STOP_TOKEN_IDS` ids that end the sequence when sampled.
    ``min_tokens``: the least number of output tokens before an end token or one of ``stop_token_ids`` can be sampled;
    at most ``max_new_tokens``. A constraint that allows nothing else prevails.
    """

    max_new_tokens: int
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """While several tenants wait, each gets tokens in proportion to its ``weight`` > 0."""

    name: str
    weight: float = 1.0


ANYONE = Tenant(name="")

# Requests of this priority are bulk work. They run where nothing else does, and others pause them.
BULK_PRIORITY = -100

# Ids of sessions up to this length are shown as they are.
_SHORT_ID = 12


def shown_session(session: str) -> str:
    """Return the ends of a session's id, to tell it from others in traces and for operators.

    Clients choose ids and may take them for secrets, so long ones are not shown to others in full.
    """
    return session if len(session) <= _SHORT_ID else f"{session[:4]}…{session[-6:]}"


class EarlyStopping(Enum):
    """When a beam search ends, in the terms of Hugging Face's ``early_stopping``."""

    # The search ends as soon as there are as many ended beams as it is wide.
    YES = True
    # It ends when no running beam can become better than the worst of the ended ones, judged by its present length.
    NO = False
    # The same, judged by the greatest possible length if ``length_penalty`` favours long outputs.
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """The place of a generation in a beam search, whose ``width`` generations are submitted one after another.

    Generation ``index`` gets the output whose score has this rank. The score is the sum of the tokens' logprobs divided
    by their number to the power of ``length_penalty``. ``eos_token_ids``: tokens that end an output, beside its stop
    tokens.
    """

    width: int
    index: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.NO
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """What an output had when the router that generated it ended.

    ``token_ids``: its tokens, none of which ended it. ``feedback``: what mirostat or adaptive-p carries from the last
    of them to the next one; None without them.
    """

    token_ids: tuple[int, ...]
    feedback: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """One sequence to generate.

    ``prompt``: one or more token ids, and numbers of cells of its ``media``. ``priority``: higher ones start first, and
    may take the cells of lower ones. ``session``: what shares with the other sessions of the ``tenant``; empty for all
    requests that name none. ``namespace``: specs with the same namespace and ``adapter`` share prefixes; a
    common prefix of specs that are submitted together is computed once. ``constraint`` has passed
    `Queries.compile_constraint`. ``adapter``: the key of one of `ModelFacts.adapters`, or empty for the model itself.
    ``prompt_logprobs``: whether to return the logprobs of the prompt; such specs share prefixes with each other, if
    they ask for as many alternatives. ``timeout_s``: from submission to the last token. ``queue_timeout_s``: from
    submission to the start, as far as the queue allows as much. ``traceparent``: of the request's span, for the log of
    its shards; empty if it is not traced. ``max_draft_tokens``: most draft tokens in one
    step. ``prediction``: tokens that the output may have, for drafts. ``beams``: see `BeamSearch`; nothing is sampled
    then, and all tokens come at the end. ``thought``: what the output begins with; the constraint applies behind it.
    ``request_id``: that of its HTTP request, for operators. ``continued``: what there is of the output, which is not
    generated again. ``keep_s``: for how many seconds after its last use what is computed of it does not make way for
    others, as far as the share of its tenant pays for that.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    media: PromptMedia | None = None
    priority: int = 0
    tenant: Tenant = ANYONE
    session: str = ""
    namespace: str = ""
    constraint: Constraint | None = None
    adapter: str = ""
    prompt_logprobs: bool = False
    timeout_s: float = math.inf
    queue_timeout_s: float = math.inf
    traceparent: str = ""
    max_draft_tokens: int = 0
    prediction: tuple[int, ...] = ()
    beams: BeamSearch | None = None
    thought: Thought | None = None
    request_id: str = ""
    continued: Continued | None = None
    keep_s: float = 0.0

    @property
    def max_length(self) -> int:
        """Number of tokens, prompt and output together, at which the sequence ends."""
        return len(self.prompt) + self.stopping.max_new_tokens


class GenerationState(Enum):
    """The stage of a generation: it waits (``queued``), possibly until its images and audio are encoded
    (``encoding``), its prompt is computed (``prefilling``), it gets tokens (``running``), it gave its place to others
    and continues later from what was saved (``swapped``), or it has all its tokens (``ended``).
    """

    QUEUED = "queued"
    ENCODING = "encoding"
    PREFILLING = "prefilling"
    RUNNING = "running"
    SWAPPED = "swapped"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a generation is, and how many of its first tokens are computed on its shard; 0 while it is on none.

    ``feedback``: what mirostat or adaptive-p carries to the next token; None without them.
    """

    state: GenerationState
    computed: int = 0
    feedback: float | None = None
