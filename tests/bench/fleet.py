"""The resident servers of a lineup, of which one at a time is loaded."""

import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.contenders import Common, Contender, Lineup, Product
from bench.figures import failures
from bench.load import Report, load
from bench.paths import BenchError, busy_seconds
from bench.rows import Profile
from bench.servers import Running, serving

_SETTLE_SAMPLE_S = 0.2
_SETTLE_LIMIT_S = 10.0
_SETTLED_SHARE = 0.05
_AGE_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The report of one load.

    Meanwhile the servers that were not loaded used ``idle_share`` of one core, and processes that do not belong to the
    comparison used ``others_share`` of the machine.
    """

    seed: int
    report: Report
    idle_share: float
    others_share: float


class Fleet:
    """Servers that are ready."""

    def __init__(self, servers: dict[Contender, Running]) -> None:
        self._servers = servers

    def age(self, profile: Profile, api: str, seed: int) -> None:
        """Send unrelated long prompts to each server, so that its cache is as full as after hours of use."""
        arguments = ["--workload", "plain", "--words", str(profile.age_words), "--tokens", str(_AGE_TOKENS)]
        arguments += ["--requests", str(profile.age_prompts), "--api", api]
        for contender in self._servers:
            aged = self.load(contender, (*arguments, "--concurrency", str(contender.slots)), seed)
            if failed := failures(aged.report):
                message = f"{contender.name} fails under unrelated prompts: {failed[0]}"
                raise BenchError(message)

    def load(self, contender: Contender, arguments: Sequence[str], seed: int) -> Load:
        """Load one server, and wait until it has nothing left to do."""
        server = self._servers[contender]
        counted: tuple[int, ...] = ()
        if contender.product is Product.CARAVAN:
            counted = server.pids() if contender.counts_shards else server.router_pids()
        started = time.monotonic()
        idle, ours, busy = self._idle_seconds(server), self._our_seconds(), busy_seconds()
        report = load(server.url, arguments, seed=seed, counted=counted)
        wall_s = time.monotonic() - started
        idle, ours = self._idle_seconds(server) - idle, self._our_seconds() - ours
        others = max(0.0, busy_seconds() - busy - ours)
        _settle(server)
        return Load(
            seed=seed,
            report=report,
            idle_share=idle / wall_s,
            others_share=others / wall_s / (os.cpu_count() or 1),
        )

    def _idle_seconds(self, loaded: Running) -> float:
        return sum(server.cpu_seconds() for server in self._servers.values() if server is not loaded)

    def _our_seconds(self) -> float:
        ended_children = resource.getrusage(resource.RUSAGE_CHILDREN)
        servers = sum(server.cpu_seconds() for server in self._servers.values())
        return servers + ended_children.ru_utime + ended_children.ru_stime


@contextmanager
def fleet(lineup: Lineup, common: Common) -> Iterator[Fleet]:
    """Start all servers of a lineup, and end them when the block ends."""
    with ExitStack() as stack:
        contenders = (lineup.ours, *lineup.peers)
        yield Fleet({contender: stack.enter_context(serving(contender, common)) for contender in contenders})


def _settle(server: Running) -> None:
    """Wait until the server uses next to no CPU time, so that its work for this load does not slow down the next."""
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    share = 1.0
    while share > _SETTLED_SHARE and time.monotonic() < deadline:
        before = server.cpu_seconds()
        time.sleep(_SETTLE_SAMPLE_S)
        share = (server.cpu_seconds() - before) / _SETTLE_SAMPLE_S
