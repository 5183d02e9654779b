"""Builds the router from its configuration and runs it. The only module that knows every part."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from aiohttp import web

import caravan_proto
from caravan_dialects.bulk.store import BulkStore
from caravan_dialects.conversations.store import Store
from caravan_router.accounting.accounts import Accounts
from caravan_router.auth.keyring import KeyWatch, single_key
from caravan_router.config import RouterConfig
from caravan_router.engine.batcher import Batcher
from caravan_router.engine.discovery import KubernetesService
from caravan_router.engine.fleet import Fleet
from caravan_router.http.app import Access, build_app
from caravan_router.http.metrics import METRICS_ACCESS, MetricsAccess, serving_metrics
from caravan_router.http.server.listener import Handover, Listen, Port, Tls, listening
from caravan_router.http.server.state import STATE, TRACING, InfoExtras
from caravan_router.kubernetes import WatchedService
from caravan_router.metrics.recorder import Metrics
from caravan_router.tracing.settings import tracing
from caravan_scheduler.core.catalogue import Catalogue
from caravan_scheduler.core.trace import Tracing
from caravan_studio.recording.recorder import Recorder

_log = logging.getLogger(__name__)
# Time for a step, for the command that releases its sequences, and for saving what shards keep of ended ones.
_SETTLE_S = 5.0


@contextmanager
def on_hangup(reload: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Call ``reload`` on each SIGHUP, but ``stop`` once the terminal of the program is closed.

    Under ``nohup``, where SIGHUP was ignored before, that does not end the program either.
    """
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, lambda: stop() if ends_with_terminal and not _has_terminal() else reload())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


OnListening = Callable[[Fleet, str], None]


class RunningCatalogue(Catalogue, Protocol):
    """A catalogue that loads and unloads models while it runs."""

    async def run(self) -> None:
        """Serve until cancelled."""
        ...


CatalogueOf = Callable[[Fleet], RunningCatalogue]


async def run_router(
    config: RouterConfig, stop: asyncio.Event, on_listening: OnListening, catalogue_of: CatalogueOf | None = None
) -> None:
    """Serve until ``stop`` is set, then let running requests end within the graceful termination timeout.

    ``on_listening`` gets the fleet and the base URL once the port is open, before any shard has joined.
    ``catalogue_of`` makes what loads and unloads models while the router runs; None if the shards are what they are.

    Raises KeyFileError, TlsFileError, McpConfigError, StateFileError, UsageFileError, AuditLogError or RecordFileError
    if a configured file is broken or cannot be written, TracingError if traces cannot be sent as configured, OSError if
    the port cannot be bound, and whatever broke the engine.
    """
    async with tracing(config.read_trace_settings()) as traces:
        await _run(config, traces, stop, on_listening, catalogue_of)


async def _run(
    config: RouterConfig,
    traces: Tracing | None,
    stop: asyncio.Event,
    on_listening: OnListening,
    catalogue_of: CatalogueOf | None,
) -> None:
    link = replace(config.link, tls=await asyncio.to_thread(config.read_shard_tls))
    metrics = Metrics(vllm_names=config.vllm_metrics)
    for name in config.expected_model:
        metrics.of(name)  # So that rules and autoscalers find its series before the first request and the first shard.
    sources = [WatchedService(one) if isinstance(one, KubernetesService) else one for one in config.sources]
    fleet = Fleet(sources, config.scheduler, link, metrics.of, config.expected_model)
    recorder = None if config.record is None else _begin_recording(config, config.record, fleet)
    catalogue = None if catalogue_of is None else catalogue_of(fleet)
    service = await http_service(config, fleet, metrics, traces, catalogue)
    handover = None if config.handover is None else Handover(Path(config.handover))
    inherited = None if handover is None else await handover.receive()
    engine = asyncio.create_task(fleet.run())
    loading = None if catalogue is None else asyncio.create_task(catalogue.run())
    stopped = asyncio.create_task(stop.wait())
    try:
        with on_hangup(service.read_files_again, stop.set):
            async with service.listening(inherited) as port, _offering(handover, port, stop):
                # What is there by now stays. Else each full collection would look at all of it, for some 50 ms.
                gc.collect()
                gc.freeze()
                on_listening(fleet, port.url)
                ends = {engine, stopped} if loading is None else {engine, stopped, loading}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
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
        if loading is not None:
            loading.cancel()
            await asyncio.wait({loading})
        if recorder is not None:
            await asyncio.to_thread(recorder.close)
    for task in (engine, loading):
        if task is not None and not task.cancelled():
            task.result()


def _begin_recording(config: RouterConfig, path: str, fleet: Fleet) -> Recorder:
    """Record all schedulers of ``fleet``. Raises RecordFileError."""
    recorder = Recorder(Path(path), most_bytes=config.record_space << 20, keeps_tokens=config.record_tokens)

    def follow(batcher: Batcher) -> None:
        batcher.followers.append(recorder.follow(batcher.model.name, batcher.scheduler, config.scheduler))

    fleet.timeline.tell_of_engines(follow)
    return recorder


async def http_service(
    config: RouterConfig,
    fleet: Fleet,
    metrics: Metrics,
    traces: Tracing | None = None,
    catalogue: Catalogue | None = None,
) -> "HttpService":
    """Read the files that ``config`` names, and build the web application over ``fleet``.

    Raises KeyFileError, TlsFileError, McpConfigError, StateFileError, UsageFileError or AuditLogError.
    """
    keys = None if config.api_keys_file is None else await asyncio.to_thread(KeyWatch, Path(config.api_keys_file))
    only_key = None if config.api_key is None else single_key(config.api_key)
    tls = None if config.tls is None else await asyncio.to_thread(Tls, config.tls)
    info = InfoExtras(
        version=caravan_proto.__version__,
        waiting_served_ratio=config.waiting_served_ratio,
        max_waiting_tokens=config.max_waiting_tokens,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        max_batch_size=config.max_batch_size,
    )
    access = Access(
        keyring=only_key if keys is None else keys.keyring,
        cors_allow_origin=config.cors_allow_origin,
        page=config.page,
        trusted_proxies=config.proxies,
        root_path=config.root_path,
        metrics=MetricsAccess(key=config.metrics_key, port=config.metrics_port, shared=config.handover is not None),
    )
    tool_servers = await asyncio.to_thread(config.read_mcp_servers)
    store = Store(config.store)
    await store.open()
    accounts = Accounts(config.accounts)
    await accounts.open()
    fleet.timeline.tell_of_engines(accounts.follow)
    app = build_app(
        fleet,
        config.limits,
        metrics,
        info=info,
        access=access,
        store=store,
        bulk=BulkStore(config.bulk),
        accounts=accounts,
        catalogue=catalogue,
        tool_servers=tool_servers,
    )
    if traces is not None:
        app[TRACING] = traces
    return HttpService(config, app, keys, tls)


class HttpService:
    """The web application of a router, and the files of keys and certificates that it reads again when they change."""

    def __init__(self, config: RouterConfig, app: web.Application, keys: KeyWatch | None, tls: Tls | None) -> None:
        """Use `http_service`."""
        self._config = config
        self._app = app
        self._tls = tls
        self._watches = [watch for watch in (keys, tls) if watch is not None]

    def read_files_again(self) -> None:
        """Read the files soon, whether or not they look changed."""
        for watch in self._watches:
            watch.file.reload()

    @asynccontextmanager
    async def listening(self, inherited: socket.socket | None = None) -> AsyncIterator[Port]:
        """Serve until the block ends, on ``inherited`` if it is given. Raises OSError if the port cannot be bound."""
        config = self._config
        listen = Listen(
            host=config.hostname,
            port=config.port,
            tls=None if self._tls is None else self._tls.context,
            drain_s=config.graceful_termination_timeout,
            inherited=inherited,
        )
        if config.is_open_to_strangers:
            _log.warning(
                "anyone who reaches this port may use the models: there is no API key (--api-key, --api-keys-file)",
                extra={"hostname": config.hostname, "port": config.port},
            )
        running = [*(watch.run() for watch in self._watches), self._app[STATE].accounts.run()]
        watching = [asyncio.create_task(one) for one in running]
        try:
            async with (
                serving_metrics(self._app[STATE].metrics, self._app[METRICS_ACCESS], config.hostname) as metrics_url,
                listening(self._app, config.limits, listen) as port,
            ):
                if metrics_url:
                    _log.info("metrics have another port", extra={"url": metrics_url})
                yield port
        finally:
            for task in watching:
                task.cancel()


@asynccontextmanager
async def _offering(handover: Handover | None, port: Port, stop: asyncio.Event) -> AsyncIterator[None]:
    """Take the port over from the router that runs, and let the next one take it over."""
    if handover is None:
        yield
        return
    handover.confirm()
    async with handover.offering(port.descriptor, stop.set):
        yield
