"""Over random work with preemptions, lost shards, new days and killed routers, usage is what an oracle has seen."""

import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan_dialects.auth.usage import Account, Counts, Kind
from caravan_router.accounting.journal import Journal, abandoned, read_journal
from caravan_router.accounting.ledger import Ledger, Row
from caravan_router.accounting.table import GROUPS, UsageTable
from caravan_scheduler.actions import Action, Deliver, Drafted, Resume, Start
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.events import Event
from caravan_testing.examples import examples
from caravan_testing.ledgers import SAVING, limits_of
from caravan_testing.simulation import Simulation

pytestmark = [pytest.mark.examples, pytest.mark.timeout(1800)]

KEYS, SESSIONS = ("alice", "bob"), ("", "s1", "a session of a long name")
STEPS = 60
Seen = Counter[tuple[Account, str]]


class Router(Simulation):
    """A router whose ledger writes its journal before actions are carried out, and which may be killed between."""

    def __init__(self, choose: random.Random, journal: Path, day: int, seen: Seen) -> None:
        super().__init__(SchedulerConfig())
        self.choose = choose
        self.day = day
        self.ledger = Ledger(day)
        self.journal = Journal(journal, slots=64)
        self.rows = set[Row]()
        # What clients and the scheduler's actions show.
        self.seen = seen
        self.dies = False

    def handle(self, *events: Event) -> list[Action]:
        actions = self.scheduler.handle(events, self.now)
        self.ledger.note("m", events, actions, self.day)
        self.journal.write(self.ledger.touched)
        self.rows |= self.ledger.touched
        self.ledger.touched.clear()
        if self.dies:
            # What was decided is counted, and nobody got it.
            raise Killed(actions)
        for action in actions:
            self._execute(action)
            self.see(action, self.seen)
        return actions

    def account(self, request_id: int) -> Account:
        spec = self.requests[request_id].spec
        session = spec.session if len(spec.session) <= 12 else f"{spec.session[:4]}…{spec.session[-6:]}"
        return Account(self.day, spec.tenant.name, session, spec.adapter or "m", Kind.COMPLETIONS)

    def see(self, action: Action, seen: Seen) -> None:
        if isinstance(action, Deliver | Start | Resume | Drafted):
            account = self.account(action.request_id)
            match action:
                case Deliver():
                    seen[account, "output"] += len(action.tokens)
                case Start():
                    seen[account, "requests"] += 1
                    seen[account, "prompt"] += len(self.requests[action.request_id].spec.prompt)
                    seen[account, "cached"] += action.cached_tokens
                case Resume():
                    seen[account, "recomputed"] += action.computed_again
                case Drafted():
                    seen[account, "drafted"] += action.count.drafted
                    seen[account, "accepted"] += action.count.accepted

    def act(self) -> None:
        """Do something at random."""
        choose = self.choose
        match choose.choice(["submit", "submit", "advance", "advance", "advance", "cancel", "lose", "day", "tick"]):
            case "submit":
                self.submit(
                    tuple(choose.randrange(1, 9) for _ in range(choose.randint(1, 40))),
                    choose.randint(1, 30),
                    ignore_eos=choose.random() < 0.5,
                    priority=choose.choice([0, 0, 5]),
                    tenant=Tenant(name=choose.choice(KEYS)),
                    session=choose.choice(SESSIONS),
                    adapter=choose.choice(["", "", "x"]),
                    max_draft_tokens=choose.choice([0, 4]),
                )
            case "advance":
                for name in [name for name, shard in self.shards.items() if shard.commands]:
                    self.advance(name, choose.randint(1, 3) if self.shards[name].commands else 0)
            case "cancel":
                if running := sorted(self.scheduler.sequences):
                    self.cancel(choose.choice(running))
            case "lose":
                name = choose.choice(sorted(self.shards))
                limits = self.shards[name].limits
                self.lose(name)
                self.join(name, limits)
            case "day":
                self.day += choose.choice([0, 0, 1])
            case _:
                self.tick(choose.random())


class Killed(Exception):
    """The router was killed after it had written that it does ``actions``, and before it did them."""

    def __init__(self, actions: list[Action]) -> None:
        super().__init__()
        self.actions = actions


def kill(journal: Journal) -> None:
    """Do what the system does with the journal of a process that is killed."""
    journal.close(is_saved=False)


def counted(table: UsageTable) -> Seen:
    found = table.read(range(1 << 20), Kind.COMPLETIONS, GROUPS, {})
    return Counter({(account, name): count for account, counts in found for name, count in counts._asdict().items()})


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(300), deadline=None)
def test_usage_is_what_was_delivered_and_killed_routers_lose_none(choose: random.Random) -> None:
    seen, ahead, day = Seen(), Seen(), 20_000
    table = UsageTable(None)
    cells = choose.choice([90, 200, 2000])
    limits = limits_of(
        cells=cells, cells_per_sequence=cells, max_sequences=6, **(SAVING if choose.random() < 0.5 else {})
    )
    with TemporaryDirectory() as folder:
        for run in range(choose.randint(1, 4)):
            router = Router(choose, Path(folder) / f"{run}.journal", day, seen)
            for name in ("a", "b"):
                router.join(name, limits)
            try:
                for _ in range(choose.randint(0, STEPS)):
                    router.act()
                    if choose.random() < 0.2:  # as once in a while
                        table.save(str(run), [(row.account, Counts(*row.counts)) for row in router.rows])
                router.dies = choose.random() < 0.7
                router.act()
            except Killed as killed:
                # At most what one call of the scheduler decided is counted beyond what clients got.
                for action in killed.actions:
                    router.see(action, ahead)
            day = router.day
            kill(router.journal)
            for path, content in abandoned([Path(folder) / f"{run}.journal"]):
                for _ in range(choose.randint(1, 2)):  # also if it is killed while it takes them over
                    table.save(str(run), read_journal(content))
                path.unlink()
    assert +counted(table) == +(seen + ahead)
    table.close()


@given(st.binary(max_size=3000), st.integers(0, 4000))
@settings(max_examples=examples(200), deadline=None)
def test_a_broken_journal_is_read_as_far_as_it_is_whole(garbage: bytes, at: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        journal, ledger = Journal(path, slots=8), Ledger(1)
        ledger.count_texts("m", "alice", [(1, 2, 3)], 1)
        ledger.count_texts("m", "bob", [(1,)], 1)
        journal.write(ledger.touched)
        content = path.read_bytes()
        kill(journal)
        whole = list(read_journal(content))
        assert sorted((account.key, counts.prompt) for account, counts in whole) == [("alice", 3), ("bob", 1)]
        broken = content[:at] + garbage + content[at + len(garbage) :]
        assert len(list(read_journal(broken))) <= len(broken) // 512 + 1
