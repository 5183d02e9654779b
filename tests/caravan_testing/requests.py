"""Requests as the scheduler sees them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import SamplingParams
from caravan_scheduler.core.generation import ANYONE, GenerationSpec, StoppingParams, Tenant
from caravan_scheduler.core.prompt_media import PromptMedia
from caravan_scheduler.core.request_metrics import Failure, RequestTimings
from caravan_scheduler.sequence import Request


def request(
    request_id: int,
    prompt: Sequence[int] = (1,),
    max_new_tokens: int = 1,
    *,
    ignore_eos: bool = False,
    priority: int = 0,
    tenant: Tenant = ANYONE,
    session: str = "",
    namespace: str = "",
    adapter: str = "",
    prompt_logprobs: bool = False,
    media: PromptMedia | None = None,
    arrived_s: float = 0.0,
    max_draft_tokens: int = 0,
    end_by_s: float = math.inf,
    keep_s: float = 0.0,
) -> Request:
    """Return a request with default sampling."""
    spec = GenerationSpec(
        prompt=tuple(prompt),
        media=media,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos),
        priority=priority,
        tenant=tenant,
        session=session,
        namespace=namespace,
        adapter=adapter,
        prompt_logprobs=prompt_logprobs,
        max_draft_tokens=max_draft_tokens,
        keep_s=keep_s,
    )
    return Request(request_id=request_id, spec=spec, arrived_s=arrived_s, end_by_s=end_by_s)


def prompt_of(tokens: int, seed: int = 1) -> tuple[int, ...]:
    """Return a prompt of ``tokens`` tokens. Prompts of different seeds differ from the first token on."""
    return tuple((seed * 7 + position) % 90 + 1 for position in range(tokens))


@dataclass
class CountedRequests:
    """The metrics of a model's requests, of which only the ends are counted."""

    failures: Counter[Failure] = field(default_factory=Counter)
    succeeded: int = 0

    def request_validated(self, input_tokens: int, max_new_tokens: int) -> None: ...

    def request_failed(self, failure: Failure, generations: int = 1) -> None:
        self.failures[failure] += generations

    def request_succeeded(self, timings: RequestTimings, generated_tokens: int, finish: FinishReason) -> None:
        self.succeeded += 1

    def observe_first_token(self, since_arrival_s: float) -> None: ...

    def observe_inter_token(self, gap_s: float) -> None: ...

    def media_decoded(self, kind: str, duration_s: float) -> None: ...

    def media_refused(self, reason: str) -> None: ...
