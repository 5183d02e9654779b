"""What became of the calls to a shard that is stopped."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
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
