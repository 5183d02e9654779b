"""Builds the router from its configuration and runs it. The only module that knows every part."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import caravan_proto
from caravan_router.auth.key_watch import KeyWatch
from caravan_router.config import RouterConfig
from caravan_router.conversations.store import Store
from caravan_router.core.trace import Tracing
from caravan_router.engine.fleet import Fleet
from caravan_router.http.app import Access, build_app
from caravan_router.http.server.handover import Handover
from caravan_router.http.server.listener import Listen, Port, listening
from caravan_router.http.server.state import TRACING, InfoExtras
from caravan_router.http.server.tls import Tls
from caravan_router.metrics.recorder import Metrics
from caravan_router.tracing.settings import tracing

_log = logging.getLogger(__name__)

# Time for a step, for the command that releases its sequences, and for saving what shards keep of ended ones.
_SETTLE_S = 5.0


OnListening = Callable[[Fleet, str], None]


async def run_router(config: RouterConfig, stop: asyncio.Event, on_listening: OnListening) -> None:
    """Serve until ``stop`` is set, then let running requests end within the graceful termination timeout.

    ``on_listening`` gets the fleet and the base URL once the port is open, before any shard has joined. Raises
    KeyFileError, TlsFileError or StateFileError if a configured file is broken, TracingError if traces cannot be sent
    as configured, OSError if the port cannot be bound, and whatever broke the engine.
    """
    async with tracing(config.read_trace_settings()) as traces:
        await _run(config, traces, stop, on_listening)


async def _run(config: RouterConfig, traces: Tracing | None, stop: asyncio.Event, on_listening: OnListening) -> None:
    keys = None if config.api_keys_file is None else await asyncio.to_thread(KeyWatch, Path(config.api_keys_file))
    tls = None if config.tls is None else await asyncio.to_thread(Tls, config.tls)
    link = replace(config.link, tls=await asyncio.to_thread(config.read_shard_tls))
    metrics = Metrics(vllm_names=config.vllm_metrics)
    for name in config.expected_model:
        metrics.of(name)  # So that rules and autoscalers find its series before the first request and the first shard.
    fleet = Fleet(config.sources, config.scheduler, link, metrics.of, config.expected_model)
    info = InfoExtras(
        version=caravan_proto.__version__,
        waiting_served_ratio=config.waiting_served_ratio,
        max_waiting_tokens=config.max_waiting_tokens,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        max_batch_size=config.max_batch_size,
    )
    access = Access(
        keyring=None if keys is None else keys.keyring,
        cors_allow_origin=config.cors_allow_origin,
    )
    store = Store(config.store)
    await store.open()
    app = build_app(fleet, config.limits, metrics, info=info, access=access, store=store)
    if traces is not None:
        app[TRACING] = traces
    handover = None if config.handover is None else Handover(Path(config.handover))
    listen = Listen(
        host=config.hostname,
        port=config.port,
        tls=None if tls is None else tls.context,
        drain_s=config.graceful_termination_timeout,
        inherited=None if handover is None else await handover.receive(),
    )
    engine = asyncio.create_task(fleet.run())
    stopped = asyncio.create_task(stop.wait())
    watched = [file for file in (keys, tls) if file is not None]
    try:
        with _kept_current(watched):
            async with listening(app, config.limits, listen) as port, _offering(handover, port, stop):
                on_listening(fleet, port.url)
                await asyncio.wait({engine, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    _log.info("draining", extra={"timeout_s": config.graceful_termination_timeout})
                    await port.stop_accepting()
                    fleet.let_go()
                    await port.finish(config.graceful_termination_timeout)
                else:
                    # It has failed, and no request would ever end.
                    port.abort()
        if not engine.done():
            await fleet.settle(_SETTLE_S)
    finally:
        stopped.cancel()
        engine.cancel()
        await asyncio.wait({engine})
    if not engine.cancelled():
        engine.result()


@asynccontextmanager
async def _offering(handover: Handover | None, port: Port, stop: asyncio.Event) -> AsyncIterator[None]:
    """Take the port over from the router that runs, and let the next one take it over."""
    if handover is None:
        yield
        return
    handover.confirm()
    async with handover.offering(port.descriptor, stop.set):
        yield


@contextmanager
def _kept_current(files: Sequence[KeyWatch | Tls]) -> Iterator[None]:
    """Reload ``files`` when they change and on SIGHUP. Without files, SIGHUP ends the program as usual."""
    if not files:
        yield
        return

    def reload() -> None:
        for file in files:
            file.reload()

    loop = asyncio.get_running_loop()
    watching = [asyncio.create_task(file.run()) for file in files]
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in watching:
            task.cancel()
