"""The composition root: the only place that knows every part of the router."""

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

import caravan_proto
from caravan_router.auth.key_watch import KeyWatch
from caravan_router.config import RouterConfig
from caravan_router.engine.batcher import Batcher
from caravan_router.http.application import Access, build_app
from caravan_router.http.state import InfoExtras
from caravan_router.metrics import Metrics

_log = logging.getLogger(__name__)

# Idle connections: longer than clients' pools keep them, far below aiohttp's hour.
_KEEPALIVE_S = 75.0
_POLL_S = 0.05


async def run_router(config: RouterConfig, stop: asyncio.Event, on_listening: Callable[[Batcher, str], None]) -> None:
    """Serve until ``stop`` is set, then let running requests end within the graceful termination timeout.

    ``on_listening`` gets the engine and the base URL once the port is open; shards may still be away. Raises
    KeyFileError if there is to be a file of API keys and it is broken, OSError if the port cannot be had, and whatever
    broke the engine.
    """
    keys = None if config.api_keys_file is None else await asyncio.to_thread(KeyWatch, Path(config.api_keys_file))
    metrics = Metrics()
    batcher = Batcher(config.shard, config.scheduler, config.link, metrics)
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
    app = build_app(batcher, config.limits, metrics, info=info, access=access)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEPALIVE_S,
        shutdown_timeout=config.graceful_termination_timeout,
    )
    await runner.setup()
    engine = asyncio.create_task(batcher.run())
    stopped = asyncio.create_task(stop.wait())
    watching = None if keys is None else asyncio.create_task(_watch(keys))
    try:
        site = web.TCPSite(runner, config.hostname, config.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        on_listening(batcher, f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await asyncio.wait({engine, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            _log.info("draining", extra={"timeout_s": config.graceful_termination_timeout})
    finally:
        await runner.cleanup()
        stopped.cancel()
        engine.cancel()
        if watching is not None:
            watching.cancel()
        await asyncio.wait({engine})
    if not engine.cancelled():
        engine.result()


async def _watch(keys: KeyWatch) -> None:
    """Until cancelled; SIGHUP, which would end a program that has no keys, reloads them."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, keys.reload)
    try:
        await keys.run()
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
