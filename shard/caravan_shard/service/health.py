"""The gRPC health service. Checks the lease and the worker's progress several times a second."""

import asyncio
import logging
from collections.abc import Sequence

from grpc_health.v1 import health, health_pb2

from caravan_shard.engine.engine import Engine
from caravan_shard.engine.worker import Worker
from caravan_shard.service.lease_guard import LeaseGuard

_log = logging.getLogger(__name__)

_INTERVAL_S = 0.1
# A service's name in health checks. It is SERVING while the shard drains, so that a liveness probe does not end that.
LIVE = "live"
# One step may fail for reasons of its own; several in a row mean that the backend is broken.
_FAILURES_TO_DISTRUST = 3


class HealthMonitor:
    """Sets the status of the health service and ends an expired lease."""

    def __init__(
        self, worker: Worker, engine: Engine, lease: LeaseGuard, services: Sequence[str], stall_timeout_s: float
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
