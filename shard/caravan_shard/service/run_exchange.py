"""Moves saved runs from shard to shard: one side sends the bytes of a run, the other checks and keeps them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc.aio

from caravan_proto.channel import open_channel
from caravan_proto.messages.limits import Saving
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_proto.tls import MutualTls
from caravan_shard.backends.base import Backend
from caravan_shard.engine.worker import Worker
from caravan_shard.protocol.commands import Adopt
from caravan_shard.protocol.results import Adopted, Refusal
from caravan_shard.sequences.run_format import BadRunError, RunFormat, RunReceiver
from caravan_shard.sequences.runs import RunStore
from caravan_shard.service.model_calls import ModelCalls

_log = logging.getLogger(__name__)

_PART_BYTES = 1 << 20
# A shard that sends nothing for so long is given up.
_SILENCE_S = 5.0
_THREADS = 4


def run_fingerprint(backend: Backend) -> str:
    """Return what the saved runs of shards must have in common to be exchanged; empty if they cannot be, or not yet."""
    return "" if backend.capacity.current.saving is Saving.NOTHING else backend.contents.state_fingerprint


class RunExchange:
    """Sends saved runs, and fetches those of other shards, one call at a time, so that memory holds one run more."""

    def __init__(
        self, worker: Worker, runs: RunStore, fingerprint: Callable[[], str], tls: MutualTls | None, calls: ModelCalls
    ) -> None:
        """``fingerprint``: returns what `run_fingerprint` says now. ``tls``: for fetching from addresses on TCP."""
        self._worker = worker
        self._runs = runs
        self._fingerprint = fingerprint
        self._tls = tls
        self._calls = calls
        self._pool = ThreadPoolExecutor(_THREADS, "runs-read")
        self._turn = asyncio.Lock()

    @property
    def _format(self) -> RunFormat | None:
        """The form of runs that are exchanged; None while there is none."""
        fingerprint = self._fingerprint()
        return RunFormat(fingerprint) if fingerprint else None

    async def read_ahead(self, keys: Sequence[bytes]) -> Refusal | None:
        """Read the files of runs, so that the worker's thread need not wait for them. Return why not, if refused."""
        return await self._calls.run(self._pool, self._runs.fetch, keys)

    async def send(self, key: bytes) -> AsyncIterator[bytes]:
        """Yield all bytes of a run in parts; nothing if it is not here, or the shard has begun to end."""
        # Its file may have to be read.
        found = await self._calls.run(self._pool, self._runs.peek, key)
        run_format = self._format
        if found is None or isinstance(found, Refusal) or run_format is None:
            return
        run, state = found
        header = await self._calls.run(self._pool, run_format.header, run, state)
        if isinstance(header, Refusal):
            return
        for whole in (memoryview(header), state.data):
            for at in range(0, len(whole), _PART_BYTES):
                yield bytes(whole[at : at + _PART_BYTES])

    async def fetch(self, address: str, hostname: str, epoch: int, keys: Sequence[bytes]) -> list[bool]:
        """Fetch runs from the shard at ``address``, which is leased under ``epoch``, in order until one fails.

        ``hostname``: see `open_channel`.
        """
        fetched: list[bool] = []
        async with self._turn, await open_channel(address, self._tls, hostname) as channel:
            stub: shard_pb2_grpc.ShardServiceAsyncStub = shard_pb2_grpc.ShardServiceStub(channel)
            for key in keys:
                try:
                    fetched.append(await self._fetch(stub, epoch, key))
                except (grpc.aio.AioRpcError, BadRunError, TimeoutError) as error:
                    reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                    _log.warning("a run cannot be fetched", extra={"source": address, "reason": reason})
                    fetched.append(False)
                if not fetched[-1]:
                    break
        return fetched + [False] * (len(keys) - len(fetched))

    async def _fetch(self, stub: "shard_pb2_grpc.ShardServiceAsyncStub", epoch: int, key: bytes) -> bool:
        if self._runs.find(key) is not None:
            return True
        run_format = self._format
        if run_format is None:
            raise BadRunError("this model has runs that cannot be exchanged, or its files were not read yet")
        receiver = RunReceiver(run_format, key, self._runs.memory_room)
        call = stub.ReadRun(shard_pb2.ReadRunRequest(epoch=epoch, key=key))
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    message = await call.read()
                if not isinstance(message, shard_pb2.ReadRunResponse):
                    break
                receiver.add(message.part)
        finally:
            call.cancel()
        finished = await self._calls.run(self._pool, receiver.finish)
        if isinstance(finished, Refusal):
            return False
        run, state = finished
        (result,) = await self._worker.submit(Adopt(run, state)).next() or (None,)
        return isinstance(result, Adopted) and result.kept

    def close(self) -> None:
        """End the threads, after what runs on them."""
        self._pool.shutdown(wait=False)
