"""What became of the calls to a shard that is stopped."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from caravan_proto.errors import ShardError
from caravan_testing.shard_harness import error_code

# A call that takes longer hangs.
_CALL_S = 60.0
PAUSE_S = 0.02
# What a command may be told in the normal course, of a shard whose sequences others release and whose cells are few.
_NORMAL = frozenset({ShardError.UNKNOWN_SEQUENCE, ShardError.UNKNOWN_RUN})

# gRPC cancels a call that has arrived when the port is closed, and that no handler has got yet.
_CLOSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass
class Tally:
    """Numbers of calls by kind and end: ``answered``, ``refused`` as the shard drains, ``closed`` with its port.

    ``has_begun_to_end``: a shard may refuse only from then on. ``problems``: calls that ended in any other way.
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    has_begun_to_end: bool = False
    problems: list[str] = field(default_factory=list)
    _awaited: set[str] = field(default_factory=set)
    _has_all: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def answered_kinds(self) -> set[str]:
        """Kinds of which a call was answered."""
        return {kind for kind, end in self.ends if end == "answered"}

    async def until_answered(self, kinds: set[str]) -> None:
        """Wait until a call of each of ``kinds`` was answered, or one ended as it may not."""
        self._awaited, self._has_all = kinds, asyncio.Event()
        self._note()
        await self._has_all.wait()

    def _note(self) -> None:
        if self.problems or self._awaited <= self.answered_kinds:
            self._has_all.set()

    async def repeat(self, kind: str, call: Callable[[], Awaitable[object]]) -> None:
        """Make calls one after another until the port is closed, or one ends as it may not."""
        while (end := await self.once(kind, call)) in ("answered", "refused"):
            if end == "refused":
                await asyncio.sleep(PAUSE_S)

    async def once(self, kind: str, call: Callable[[], Awaitable[object]]) -> str:
        """Make a call and return how it ended."""
        try:
            async with asyncio.timeout(_CALL_S):
                await call()
            end = "answered"
        except TimeoutError:
            self.problems.append(f"{kind}: no answer within {_CALL_S:g} s")
            end = "problem"
        except grpc.aio.AioRpcError as error:
            end = self._end_of(kind, error)
        self.ends[kind, end] += 1
        self._note()
        return end

    def _end_of(self, kind: str, error: grpc.aio.AioRpcError) -> str:
        code = error_code(error)
        if code in _NORMAL:
            return "answered"
        if self.has_begun_to_end and code is ShardError.DRAINING:
            return "refused"
        if self.has_begun_to_end and code is None and error.code() in _CLOSED:
            return "closed"
        self.problems.append(f"{kind}: {error.code().name} {error.details()!r}, ending: {self.has_begun_to_end}")
        return "problem"


# What a program writes of a fault in C code, and of an exception that nobody handles.
_FAULTS = ("Fatal Python error", "Traceback (most recent call last)", "terminate called")


@dataclass
class Stopped:
    """A stop. ``seconds``: from the request to end until the process has ended."""

    way: str
    model: str
    seconds: float = 0.0
    exit_name: str = ""
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        calls = Counter[str]()
        for (_kind, end), count in self.ends.items():
            calls[end] += count
        found = ", ".join(f"{count} {end}" for end, count in sorted(calls.items()))
        return f"{self.way:8} {self.model:8} exit {self.exit_name}, {self.seconds:5.2f} s, calls: {found}"


def faults_in(log: str) -> list[str]:
    """Return the lines of ``log`` that tell of a fault, each with those behind it."""
    lines = log.splitlines()
    return [
        "\n".join(lines[place : place + 30])
        for place, line in enumerate(lines)
        if any(fault in line for fault in _FAULTS)
    ]


def summary(stops: Sequence[Stopped]) -> str:
    """Return the figures of ``stops``, by the way in which the shards were stopped, and of their calls by kind."""
    lines = []
    for way in dict.fromkeys(stop.way for stop in stops):
        these = [stop for stop in stops if stop.way == way]
        seconds = [stop.seconds for stop in these]
        exits = Counter(stop.exit_name for stop in these)
        lines.append(
            f"{way}: {len(these)} stops, exits {dict(exits)}, seconds median {statistics.median(seconds):.2f}, "
            f"longest {max(seconds):.2f}"
        )
    ends = Counter[tuple[str, str]]()
    for stop in stops:
        ends.update(stop.ends)
    for kind in sorted({kind for kind, _ in ends}):
        counts = {end: count for (of_kind, end), count in sorted(ends.items()) if of_kind == kind}
        lines.append(f"  {kind}: {', '.join(f'{count} {end}' for end, count in counts.items())}")
    return "\n".join(lines)
