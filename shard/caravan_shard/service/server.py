"""The life of a shard process: load the model, serve, drain, end."""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from caravan_proto.channel import server_options
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_proto.tls import MutualTls, TlsFileError
from caravan_shard.backends.base import Backend
from caravan_shard.config import ShardConfig
from caravan_shard.engine.engine import Engine
from caravan_shard.engine.worker import Worker
from caravan_shard.service.lease import ShardLease
from caravan_shard.service.loaded_shard import LoadedShard
from caravan_shard.service.phase import Phase
from caravan_shard.service.servicer import ShardServicer
from caravan_shard.service.starter import report_ready
from caravan_shard.startup_error import StartupError

_log = logging.getLogger(__name__)

_INTERVAL_S = 0.1
# A service's name in health checks. It is SERVING while the shard drains, so that a liveness probe does not end that.
LIVE = "live"
# One step may fail for reasons of its own; several in a row mean that the backend is broken.
_FAILURES_TO_DISTRUST = 3

_SERVICE = shard_pb2.DESCRIPTOR.services_by_name["ShardService"].full_name
_DRAIN_POLL_S = 0.05
_NOTICE_S = 2.0
_STOP_GRACE_S = 1.0


class HealthMonitor:
    """The gRPC health service. Checks the lease and the worker's progress several times a second."""

    def __init__(
        self, worker: Worker, engine: Engine, lease: ShardLease, services: Sequence[str], stall_timeout_s: float
    ) -> None:
        self.servicer = health.aio.HealthServicer()
        self._worker = worker
        self._engine = engine
        self._lease = lease
        self._services = ("", *services)
        self._stall_timeout_s = stall_timeout_s
        self._trouble: str | None = "starting"
        self._draining = False

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            self._lease.expire()
            await self._set(self._find_trouble())
            await asyncio.sleep(_INTERVAL_S)

    async def drain(self) -> None:
        """Report NOT_SERVING from now on, except for `LIVE`."""
        self._draining = True
        await self._set(self._trouble)

    def _find_trouble(self) -> str | None:
        if self._worker.stalled_s() > self._stall_timeout_s:
            return f"no step in {self._stall_timeout_s:g} s though there is work"
        if self._engine.failures_in_a_row >= _FAILURES_TO_DISTRUST:
            return "step after step fails"
        return None

    async def _set(self, trouble: str | None) -> None:
        live = trouble is None
        for service in self._services:
            await self.servicer.set(service, _status(live and not self._draining))
        await self.servicer.set(LIVE, _status(live))
        if trouble is not None and trouble != self._trouble:
            _log.error("not serving: %s", trouble)
        elif trouble is None and self._trouble is not None:
            _log.info("serving")
        self._trouble = trouble


def _status(serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING


class ShardServer:
    """One shard in this process. Create it, `start` it and finally `stop` it, all on one event loop."""

    def __init__(self, config: ShardConfig, load: Callable[[], Backend] | None = None) -> None:
        """``load`` makes the backend on the worker's thread; by default the one that the flags name."""
        self._config = config
        # A router wants the shard to drain.
        self.drain_asked = asyncio.Event()
        self._shard = LoadedShard(config, load, self.drain_asked.set)
        self._server = grpc.aio.server(options=server_options())
        self._health_server = grpc.aio.server()
        self._health: HealthMonitor | None = None
        # Releases what `start` acquired, the last first.
        self._acquired = contextlib.AsyncExitStack()
        self.address = config.address

    async def start(self) -> None:
        """Load the model and serve. Raises StartupError."""
        # Before the model, whose loading takes long.
        tls = await asyncio.to_thread(self._read_certificates)
        shard = self._shard
        await shard.start(tls)
        self._acquired.push_async_callback(shard.close)
        self._health = HealthMonitor(shard.worker, shard.engine, shard.lease, [_SERVICE], self._config.stall_timeout_s)
        shard_pb2_grpc.add_ShardServiceServicer_to_server(ShardServicer(shard.calls), self._server)
        for server in (self._server, self._health_server):
            health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        names = (_SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._acquired.push_async_callback(self._health_server.stop, None)
        self._acquired.push_async_callback(self._server.stop, _STOP_GRACE_S)
        self._acquired.push_async_callback(shard.stop_worker)
        try:
            self._bind(tls)
        except StartupError:
            await self.stop()
            raise
        await self._server.start()
        if self._config.health_address:
            await self._health_server.start()
        checking = asyncio.create_task(self._health.run())
        self._acquired.callback(checking.cancel)
        _log.info("listening", extra={"address": self.address, "shard": self._config.shard_id})

    def _read_certificates(self) -> MutualTls | None:
        try:
            return None if self._config.tls is None else MutualTls(self._config.tls)
        except TlsFileError as error:
            raise StartupError(str(error)) from error

    def _bind(self, tls: MutualTls | None) -> None:
        try:
            if tls is None:
                port = self._server.add_insecure_port(self._config.address)
            else:
                port = self._server.add_secure_port(self._config.address, tls.server_credentials())
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {self._config.address}: {error}") from error
        path = self._config.unix_path
        if path is None:
            self.address = f"{self._config.address.rpartition(':')[0]}:{port}"
        else:
            path.chmod(0o600)
            self._acquired.callback(path.unlink, missing_ok=True)
        if self._config.health_address:
            try:
                self._health_server.add_insecure_port(self._config.health_address)
            except RuntimeError as error:
                raise StartupError(f"cannot listen on {self._config.health_address}: {error}") from error

    async def drain(self) -> None:
        """Tell the router, then wait until it gives the lease back, at most the drain timeout.

        It does so once the sequences, and what is worth keeping of ended ones, have moved to other shards or ended.
        New sequences are refused only after ``_NOTICE_S``. A refusal ends the router's session, in which all sequences
        lose their cells, so commands that were sent before the router knew are still carried out.
        """
        assert self._health is not None
        shard, began = self._shard, monotonic()
        shard.phase.advance(Phase.DRAINING)
        await self._health.drain()
        _log.info("draining", extra={"sequences": shard.engine.unfinished_count})
        # Polled, because the counters belong to the worker's thread.
        while shard.lease.is_held or shard.worker.is_busy:
            waited_s = monotonic() - began
            if waited_s >= self._config.drain_timeout_s:
                return
            shard.engine.draining = waited_s >= _NOTICE_S
            await asyncio.sleep(_DRAIN_POLL_S)

    async def failed(self) -> None:
        """Wait until the worker fails, and raise its exception."""
        await self._shard.failed()

    async def stop(self) -> bool:
        """Remove the socket file and end everything that runs. Return whether all of it has ended.

        Calls are refused first. Those that use the model are answered and the model is freed, then the connections end.
        If something still uses the model after `STOP_S`, the model stays, and the process must end without cleaning up.
        """
        self._shard.phase.advance(Phase.ENDED)
        await self._acquired.aclose()
        return self._shard.has_freed_model


async def serve(config: ShardConfig) -> bool:
    """Run until a signal or a router has drained the shard, or a second signal ends it.

    Return whether everything has ended; see `ShardServer.stop`. Raises StartupError, and what broke the worker.
    """
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = ShardServer(config)
    starting = asyncio.ensure_future(server.start())
    asked = asyncio.ensure_future(first.wait())
    await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
    try:
        await starting  # loading cannot be interrupted
    except StartupError:
        raise
    except Exception as error:
        _log.exception("the shard could not start")
        raise StartupError(f"unexpected {error!r}; its traceback is above") from error
    # What is there by now stays. Else each full collection would look at all of it, and steps would wait.
    gc.collect()
    gc.freeze()
    try:
        if config.ready_fd >= 0:
            report_ready(config.ready_fd)
        drain_asked = asyncio.ensure_future(server.drain_asked.wait())
        await _first_of(asked, drain_asked, asyncio.ensure_future(server.failed()))
        await _first_of(
            asyncio.ensure_future(server.drain()),
            asyncio.ensure_future(second.wait()),
            asyncio.ensure_future(server.failed()),
        )
    finally:
        has_ended = await server.stop()
    _log.info("ended")
    return has_ended


async def _first_of(*tasks: asyncio.Future[Any]) -> None:
    """Wait for one of the tasks, raise what it raised, and cancel the others."""
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()
