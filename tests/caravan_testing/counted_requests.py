"""Counts requests for tests of the dialects, without the router's metrics."""

from collections import Counter
from dataclasses import dataclass, field

from caravan_scheduler.core.request_metrics import Failure, RequestTimings


@dataclass
class CountedRequests:
    """The metrics of a model's requests, of which only the ends are counted."""

    failures: Counter[Failure] = field(default_factory=Counter)
    succeeded: int = 0

    def request_validated(self, input_tokens: int, max_new_tokens: int) -> None: ...

    def request_failed(self, failure: Failure, generations: int = 1) -> None:
        self.failures[failure] += generations

    def request_succeeded(self, timings: RequestTimings, generated_tokens: int) -> None:
        self.succeeded += 1

    def observe_first_token(self, since_arrival_s: float) -> None: ...

    def observe_inter_token(self, gap_s: float) -> None: ...

    def media_decoded(self, kind: str, duration_s: float) -> None: ...

    def media_refused(self, reason: str) -> None: ...
