"""A shard in this process, and the router's engine over it, without HTTP and gRPC."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from caravan import errors
from caravan.local_shard import LocalShard
from caravan.server import Served
from caravan_dialects.chat.template_renderer import TemplateRenderer
from caravan_dialects.media.decoder import MediaDecoder
from caravan_router.config import RouterConfig
from caravan_router.engine.discovery import Address
from caravan_router.engine.fleet import Fleet
from caravan_router.engine.link_config import LinkConfig
from caravan_router.metrics.recorder import Metrics
from caravan_shard.backends.base import StartupError
from caravan_shard.config import ShardConfig
from caravan_shard.named_models import with_model_files
from caravan_shard.service.loaded_shard import LoadedShard

_ADDRESS = "unix:this-process"
# Shard and router live and end together, so neither gives the other up.
_NEVER_S = 86_400.0
_SETTLE_S = 5.0
# Fast steps are reported together, as over the network: each report takes time of the thread that tokenizes.
_REPLY_INTERVAL_MS = 20

# Takes the bug by which an engine has ended.
OnFailure = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """What runs between `started` and `close`. ``servers``: those over the engine that have not ended."""

    shard: LoadedShard
    fleet: Fleet
    templates: TemplateRenderer
    decoder: MediaDecoder
    servers: set[Served]
    closing: AsyncExitStack

    @classmethod
    async def started(cls, shard: ShardConfig, router: RouterConfig, metrics: Metrics, on_failure: OnFailure) -> Self:
        """Load the model. ``on_failure`` is called if the engine fails, after which no call would end by itself.

        Raises ModelError.
        """
        try:
            shard = await with_model_files(shard)
            loaded = LoadedShard(shard)
            await loaded.start()
        except StartupError as error:
            raise errors.ModelError(str(error)) from None
        async with AsyncExitStack() as closing:
            closing.push_async_callback(loaded.stop)
            templates, decoder, servers = TemplateRenderer(), MediaDecoder(), set[Served]()
            closing.push_async_callback(templates.close)
            closing.push_async_callback(decoder.close)
            link = LinkConfig(
                router_id="this-process",
                lease_ttl_s=_NEVER_S,
                silence_s=_NEVER_S,
                step_timeout_s=_NEVER_S,
                wants_drafts=router.speculate > 0,
                connect=lambda address: LocalShard(address, loaded.calls, _REPLY_INTERVAL_MS),
                outlives_bugs=False,
            )
            fleet = Fleet((Address(_ADDRESS),), router.scheduler, link, metrics.of)
            running = asyncio.create_task(fleet.run())
            closing.push_async_callback(cancelled, running)
            closing.push_async_callback(cancelled, asyncio.create_task(_watch(running, servers, on_failure)))
            if shard.cache_dir:
                # What the shard keeps of ended sequences is saved to files. In memory it would end with the shard.
                closing.push_async_callback(fleet.settle, _SETTLE_S)
            await fleet.wait_until_ready()
            return cls(loaded, fleet, templates, decoder, servers, closing.pop_all())

    async def close(self) -> None:
        """End the servers and all that runs, and free the model."""
        await _cut(self.servers)
        await self.closing.aclose()


async def _watch(running: "asyncio.Task[None]", servers: set[Served], on_failure: OnFailure) -> None:
    """If the engine fails, say so and cut the servers, whose requests would wait for it for ever."""
    await asyncio.wait({running})
    failure = None if running.cancelled() else running.exception()
    if failure is None:
        return
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    on_failure(failure)
    await _cut(servers)


async def _cut(servers: set[Served]) -> None:
    await asyncio.gather(*(server.cut() for server in servers))


async def cancelled(task: "asyncio.Task[None]") -> None:
    """Cancel ``task`` and wait until it has ended."""
    task.cancel()
    await asyncio.wait({task})
