"""Counts tokens by what schedulers hear and decide. Pure: it knows neither clock nor file.

The rules:

- A prompt counts when it starts, once for all choices of a request that share it, as in the ``usage`` of replies.
- An output token counts when it is decided to deliver it. An accepted draft is an output token; other drafts only
  appear as drafted. What a step computes after a stop string counts.
- A beam search delivers at its end, and counts then.
- What continues after its router ended is not counted again; its tokens that have to be computed again are recomputed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from caravan_dialects.auth.usage import (
    ACCEPTED,
    CACHED,
    DRAFTED,
    OUTPUT,
    PROMPT,
    RECOMPUTED,
    REQUESTS,
    Account,
    Counts,
    Kind,
    Spent,
    first_day_of_month,
)
from caravan_proto.messages.adapters import adapter_name
from caravan_scheduler.actions import Action, Deliver, Drafted, Fail, FailureReason, Faulted, Left, Resume, Start
from caravan_scheduler.core.generation import GenerationSpec, shown_session
from caravan_scheduler.events import Cancelled, Event, Submitted, Taken

# Sessions of a key, model and day that are counted apart; clients choose their names. Others count without a session.
MOST_SESSIONS = 256

CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Row:
    """The counts of an account since this router began. ``slot``: where its slot of the journal begins."""

    account: Account
    spent: Spent
    counts: list[int] = field(default_factory=lambda: [0] * len(Counts._fields))
    slot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A generation, or a request for vectors, that has ended. ``status``: its finish reason, or why it has none.

    ``request_id``: its ``X-Request-Id``.
    """

    account: Account
    request_id: str
    counts: Counts
    status: str


@dataclass(slots=True, eq=False)
class _Running:
    """A generation under way. ``counts``: its own. ``shares``: the key of those that share its prompt."""

    spec: GenerationSpec
    row: Row
    shares: tuple[str, int]
    counts: list[int] = field(default_factory=lambda: [0] * len(Counts._fields))


class Ledger:
    """The counts of all models. ``touched``: rows that have changed since the caller has emptied it.

    ``on_end`` is told of everything that ends. ``day`` is in days since 1970 in all methods and never goes back.
    """

    def __init__(self, day: int, on_end: Callable[[Ended], None] = lambda _: None) -> None:
        self.touched: set[Row] = set()
        self._day = day
        self._on_end = on_end
        self._rows: dict[Account, Row] = {}
        self._sessions: dict[tuple[str, str], set[str]] = {}
        self._spent: dict[str, Spent] = {}
        self._running: dict[int, _Running] = {}
        # Generations under way that share a prompt, and whether one of them has started.
        self._sharing: dict[tuple[str, int], int] = {}
        self._started: set[tuple[str, int]] = set()

    def spent(self, key: str) -> Spent:
        """Return what the key has used, a value that goes on counting."""
        return self._spent.setdefault(key, Spent())

    def set_elsewhere(self, spent: Mapping[str, tuple[int, int]]) -> None:
        """Note what other processes have counted for each key today and this month; nothing for the other keys."""
        for key in self._spent.keys() | spent.keys():
            found = self.spent(key)
            found.elsewhere_today, found.elsewhere_this_month = spent.get(key, (0, 0))

    def begin(self, day: int) -> None:
        """Count in rows of ``day`` from now on, if it is another one."""
        if day <= self._day:
            return
        is_same_month = first_day_of_month(day) == first_day_of_month(self._day)
        self._day = day
        self._sessions.clear()
        for spent in self._spent.values():
            spent.before_today, spent.elsewhere_today = spent.total, 0
            if not is_same_month:
                spent.before_this_month, spent.elsewhere_this_month = spent.total, 0
        for found in self._running.values():
            found.row = self._row(found.row.account._replace(day=day))

    def note(self, model: str, events: Iterable[Event], actions: Iterable[Action], day: int) -> None:
        """Count what the scheduler of ``model`` has decided because of ``events``."""
        self.begin(day)
        cancelled = []
        for event in events:
            match event:
                case Submitted(request):
                    self._open(model, request.request_id, request.spec)
                case Taken(sequences):
                    for sequence in sequences:
                        self._open(model, sequence.request_id, sequence.spec, is_known=sequence.started)
                case Cancelled(request_id):
                    # Its last tokens may be among the actions.
                    cancelled.append(request_id)
                case _:
                    pass
        running, touched = self._running, self.touched
        for action in actions:
            # Not a match: most actions are these, one for each sequence and step.
            if type(action) is Deliver:
                if action.tokens and (found := running.get(action.request_id)) is not None:
                    count, row = len(action.tokens), found.row
                    found.counts[OUTPUT] += count
                    row.counts[OUTPUT] += count
                    row.spent.total += count
                    touched.add(row)
                    if (finish := action.tokens[-1].finish) is not None:
                        self._end(action.request_id, finish.value)
            else:
                self._note_other(action)
        for request_id in cancelled:
            self._end(request_id, CANCELLED)

    def _note_other(self, action: Action) -> None:
        match action:
            case Start() | Resume() | Drafted():
                if (found := self._running.get(action.request_id)) is not None:
                    self._note_work(found, action)
            case Fail():
                self._end(action.request_id, action.reason.value)
            case Left():
                for sequence in action.sequences:
                    self._end(sequence.request_id, "moved")
            case Faulted():
                for request_id in action.request_ids:
                    self._end(request_id, FailureReason.FAULT.value)
            case _:
                pass

    def count_texts(self, model: str, key: str, texts: Sequence[Sequence[int]], day: int) -> None:
        """Count a request whose ``texts``, as token ids, were embedded or scored for ``key``."""
        self.begin(day)
        row = self._row(Account(self._day, key, "", model, Kind.EMBEDDINGS))
        counts = Counts(requests=1, prompt=sum(map(len, texts)))
        for column, count in enumerate(counts):
            row.counts[column] += count
        row.spent.total += counts.prompt
        self.touched.add(row)
        self._on_end(Ended(account=row.account, request_id="", counts=counts, status="stop"))

    def end_all(self) -> None:
        """End what runs, since the router ends and closes the connections."""
        for request_id in list(self._running):
            self._end(request_id, CANCELLED)

    def forget_ended_days(self, but: Collection[Row]) -> list[Row]:
        """Forget, and return, the rows in which nothing is counted any more, except those in ``but``."""
        ended = [row for row in self._rows.values() if row.account.day < self._day and row not in but]
        for row in ended:
            del self._rows[row.account]
        return ended

    def _open(self, model: str, request_id: int, spec: GenerationSpec, *, is_known: bool = False) -> None:
        session = shown_session(spec.session)
        account = Account(self._day, spec.tenant.name, session, adapter_name(spec.adapter) or model, Kind.COMPLETIONS)
        shares = (spec.request_id, id(spec.prompt))
        self._sharing[shares] = self._sharing.get(shares, 0) + 1
        if is_known:
            self._started.add(shares)
        self._running[request_id] = _Running(spec, self._row(account), shares)

    def _note_work(self, found: _Running, action: Start | Resume | Drafted) -> None:
        match action:
            case Start():
                self._start(found, action)
            case Resume():
                self._add(found, RECOMPUTED, action.computed_again)
            case Drafted():
                self._add(found, DRAFTED, action.count.drafted)
                self._add(found, ACCEPTED, action.count.accepted)

    def _start(self, found: _Running, start: Start) -> None:
        if (continued := found.spec.continued) is not None:
            # What was cached of the output is not known unless a part of the prompt was not.
            computed = start.prompt_tokens - start.cached_tokens
            self._add(found, RECOMPUTED, computed + len(continued.token_ids) if computed else 0)
        elif found.shares not in self._started:
            self._add(found, REQUESTS, 1)
            self._add(found, PROMPT, start.prompt_tokens)
            self._add(found, CACHED, start.cached_tokens)
            found.row.spent.total += start.prompt_tokens
        self._started.add(found.shares)

    def _add(self, found: _Running, column: int, count: int) -> None:
        if count:
            found.counts[column] += count
            found.row.counts[column] += count
            self.touched.add(found.row)

    def _end(self, request_id: int, status: str) -> None:
        found = self._running.pop(request_id, None)
        if found is None:
            return
        self._sharing[found.shares] -= 1
        if not self._sharing[found.shares]:
            del self._sharing[found.shares]
            self._started.discard(found.shares)
        ended = Ended(
            account=found.row.account, request_id=found.spec.request_id, counts=Counts(*found.counts), status=status
        )
        self._on_end(ended)

    def _row(self, account: Account) -> Row:
        row = self._rows.get(account)
        if row is None:
            sessions = self._sessions.setdefault((account.key, account.model), set())
            if account.session not in sessions and len(sessions) >= MOST_SESSIONS and account.session:
                return self._row(account._replace(session=""))
            sessions.add(account.session)
            row = self._rows[account] = Row(account, self.spent(account.key))
        return row
