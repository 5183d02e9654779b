"""A whole shard in this process, with the toy backend and gRPC over a Unix socket."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from caravan_proto.channel import client_options
from caravan_proto.errors import ShardError, parse_error
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc, types_pb2
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service.server import ShardServer
from caravan_testing.waiting import in_time

COMMAND = (sys.executable, "-m", "caravan_shard")
NEUTRAL_SAMPLING = {"top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}


@dataclass
class RunningShard:
    """A started shard with a client. Call `take` before any command."""

    server: ShardServer
    backend: ToyBackend
    address: str
    channel: grpc.aio.Channel
    stub: Any
    epoch: int = 0

    async def take(self, epoch: int = 1, *, router_id: str = "test", ttl_ms: int = 600_000) -> shard_pb2.LeaseResponse:
        """Lease the shard; later commands carry the epoch."""
        response: shard_pb2.LeaseResponse = await self.stub.Lease(
            shard_pb2.LeaseRequest(router_id=router_id, epoch=epoch, ttl_ms=ttl_ms)
        )
        self.epoch = epoch
        return response

    async def give_back(self, *, router_id: str = "test") -> None:
        """End the lease."""
        await self.stub.Lease(shard_pb2.LeaseRequest(router_id=router_id, epoch=self.epoch, release=True))

    def header(
        self,
        release: Iterable[int] = (),
        park: Mapping[int, int] | None = None,
        drop: Iterable[bytes] = (),
        spill: Iterable[bytes] = (),
    ) -> types_pb2.CommandHeader:
        """Make the header of a command; ``park`` has the length to keep by sequence id."""
        parks = [types_pb2.ParkedSequence(sequence_id=key, length=length) for key, length in (park or {}).items()]
        return types_pb2.CommandHeader(
            epoch=self.epoch, release_sequence_ids=release, park=parks, drop_runs=drop, spill_runs=spill
        )

    def prefill(
        self, *chunks: types_pb2.PrefillChunk, riders: Iterable[int] = (), **header: Any
    ) -> grpc.aio.UnaryUnaryCall[Any, shard_pb2.PrefillResponse]:
        """Start a Prefill."""
        request = shard_pb2.PrefillRequest(header=self.header(**header), chunks=chunks, ride_sequence_ids=riders)
        return self.stub.Prefill(request)  # type: ignore[no-any-return]

    def decode(
        self, sequence_ids: Iterable[int], max_steps: int = 1_000, **header: Any
    ) -> grpc.aio.UnaryStreamCall[Any, shard_pb2.DecodeResponse]:
        """Start a Decode; it is queued once it has initial metadata."""
        request = shard_pb2.DecodeRequest(header=self.header(**header), sequence_ids=sequence_ids, max_steps=max_steps)
        return self.stub.Decode(request)  # type: ignore[no-any-return]

    async def steps(
        self, sequence_ids: Iterable[int], max_steps: int = 1_000, **header: Any
    ) -> AsyncIterator[shard_pb2.DecodeStep]:
        """Decode; yield the steps one by one."""
        async for response in self.decode(sequence_ids, max_steps, **header):
            for step in response.steps:
                yield step

    def keep(self, *sequence_ids: int, **header: Any) -> grpc.aio.UnaryUnaryCall[Any, shard_pb2.FilterBatchResponse]:
        """Start a FilterBatch."""
        request = shard_pb2.FilterBatchRequest(header=self.header(**header), keep_sequence_ids=sequence_ids)
        return self.stub.FilterBatch(request)  # type: ignore[no-any-return]

    def save(
        self, *entries: shard_pb2.SaveEntry, **header: Any
    ) -> grpc.aio.UnaryUnaryCall[Any, shard_pb2.SaveResponse]:
        """Start a Save."""
        return self.stub.Save(shard_pb2.SaveRequest(header=self.header(**header), entries=entries))  # type: ignore[no-any-return]

    def load(
        self, *entries: shard_pb2.LoadEntry, **header: Any
    ) -> grpc.aio.UnaryUnaryCall[Any, shard_pb2.LoadResponse]:
        """Start a Load."""
        return self.stub.Load(shard_pb2.LoadRequest(header=self.header(**header), entries=entries))  # type: ignore[no-any-return]

    def set_layout(
        self, layout: shard_pb2.KvLayout.ValueType, **header: Any
    ) -> grpc.aio.UnaryUnaryCall[Any, shard_pb2.SetLayoutResponse]:
        """Start a SetLayout."""
        return self.stub.SetLayout(shard_pb2.SetLayoutRequest(header=self.header(**header), kv_layout=layout))  # type: ignore[no-any-return]

    async def runs(self) -> list[tuple[bytes, int, int, bool]]:
        """Return the key, start, end and whether it is on disk, of each saved run."""
        found = []
        async for part in self.stub.ListRuns(shard_pb2.ListRunsRequest()):
            last = -1
            for start, count, on_disk in zip(part.starts, part.cut_counts, part.on_disk, strict=True):
                last += count
                found.append((part.keys[last], start, part.cuts[last], on_disk))
        return found

    async def notes(self) -> dict[bytes, bytes]:
        """Return the note of each saved run, by its key."""
        notes = [note async for part in self.stub.ListRuns(shard_pb2.ListRunsRequest()) for note in part.notes]
        return {key: note for (key, *_), note in zip(await self.runs(), notes, strict=True)}


def prompt_chunk(
    sequence_id: int,
    tokens: Sequence[int],
    *,
    max_new: int = 50,
    ignore_eos: bool = False,
    copy: types_pb2.PrefixCopy | None = None,
    **sampling: Any,
) -> types_pb2.PrefillChunk:
    """Make a whole prompt in one chunk: ``tokens`` follow the copied ones."""
    start = 0 if copy is None else copy.length
    return types_pb2.PrefillChunk(
        sequence_id=sequence_id,
        start=start,
        copy=copy,
        token_ids=tokens,
        last=True,
        parameters=types_pb2.SequenceParameters(
            sampling=types_pb2.SamplingParameters(**{**NEUTRAL_SAMPLING, **sampling}),
            prompt_length=start + len(tokens),
            max_length=start + len(tokens) + max_new,
            ignore_eos=ignore_eos,
        ),
    )


def error_code(error: grpc.aio.AioRpcError) -> ShardError | None:
    """Return the shard's own code, which must come with its gRPC status."""
    code, _sentence = parse_error(error.details())
    assert code is None or error.code() is code.status
    return code


async def refused(call: Awaitable[Any]) -> ShardError | None:
    """Return the code of a call that must be refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_code(caught.value)


@asynccontextmanager
async def shard_process(
    folder: Path, *flags: str, stderr: int | None = None
) -> AsyncIterator[tuple[asyncio.subprocess.Process, RunningShard]]:
    """Start the shard program on the toy backend, with a client; kill it at the end if it still runs."""
    address = f"unix:{folder / 'shard'}"
    command = (*COMMAND, "--backend", "fake", "--address", address, *flags)
    process = await asyncio.create_subprocess_exec(*command, stderr=stderr)
    try:
        async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
            async with in_time("the shard listens"):
                await channel.channel_ready()
            server = ShardServer(ShardConfig(backend="fake", address=address))
            stub = shard_pb2_grpc.ShardServiceStub(channel)
            yield process, RunningShard(server, ToyBackend(), address, channel, stub)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def running_shard(backend: ToyBackend | None = None, **flags: Any) -> AsyncIterator[RunningShard]:
    """Start a shard on the toy backend; ``flags`` are fields of ShardConfig."""
    backend = backend or ToyBackend()
    with tempfile.TemporaryDirectory(prefix="caravan") as folder:
        address = f"unix:{Path(folder) / 'shard'}"
        server = ShardServer(ShardConfig(backend="fake", address=address, **flags), lambda: backend)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
                yield RunningShard(server, backend, address, channel, shard_pb2_grpc.ShardServiceStub(channel))
        finally:
            await server.stop()
