"""What API keys have used, as values: tokens by day, key, session and model, and what counts against a budget."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import NamedTuple

DAY_S = 86_400
_FIRST_DAY = date(1970, 1, 1)


class Kind(Enum):
    """What a model was used for: generations, or vectors and scores of texts."""

    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


class Account(NamedTuple):
    """What is counted apart. ``day``: days since 1970 in UTC. ``session``: as `shown_session` shows it; "" for none."""

    day: int
    key: str
    session: str
    model: str
    kind: Kind


class Counts(NamedTuple):
    """Requests and tokens of an account.

    ``requests``: prompts, each with all of its choices. ``prompt`` includes ``cached``, which did not need to be
    computed. ``output``: tokens that requests got, accepted drafts included. ``recomputed``: tokens that were computed
    again since others needed their cells or a shard was lost. ``drafted``: draft tokens that were verified, of which
    ``accepted`` became output. Only ``prompt`` and ``output`` count against a budget.
    """

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    recomputed: int = 0
    drafted: int = 0
    accepted: int = 0


REQUESTS, PROMPT, CACHED, OUTPUT, RECOMPUTED, DRAFTED, ACCEPTED = range(len(Counts._fields))


@dataclass(slots=True, eq=False)
class Spent:
    """Tokens of prompts and outputs that a key has used on this day and in this month, in UTC.

    ``total``: since this process began, of which ``before_today`` and ``before_this_month`` do not count any more.
    ``elsewhere_``: what other processes have counted, before this one or beside it.
    """

    total: int = 0
    before_today: int = 0
    before_this_month: int = 0
    elsewhere_today: int = 0
    elsewhere_this_month: int = 0

    def of(self, period: "Period") -> int:
        """Return what was used in the current period, by all processes."""
        if period is Period.DAY:
            return self.total - self.before_today + self.elsewhere_today
        return self.total - self.before_this_month + self.elsewhere_this_month


class Period(Enum):
    """What a budget is for."""

    DAY = "day"
    MONTH = "month"

    def next_begins(self, now_s: float) -> datetime:
        """Return when the next one begins after ``now_s``, in seconds since 1970."""
        today = datetime.fromtimestamp(now_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self is Period.DAY:
            return today + timedelta(days=1)
        return (today.replace(day=1) + timedelta(days=32)).replace(day=1)


def first_day_of_month(day: int) -> int:
    """Return the first day of the month of ``day``; both are days since 1970."""
    return day - (_FIRST_DAY + timedelta(days=day)).day + 1
