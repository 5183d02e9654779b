"""The adapters of one model that were loaded while its shards ran.

Each is on every shard: one that joins loads them first. A shard frees them with the lease, so a router that starts has
none. One that is unloaded takes no new requests, and is freed once those that it has have ended.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from caravan_proto.errors import ShardError
from caravan_proto.messages.adapters import AdapterSource, LoadedAdapter, adapter_name
from caravan_router.engine.link import RefusedError, ShardLink
from caravan_router.engine.replicas import Replicas
from caravan_router.engine.shard_calls import ShardCalls, ShardRpcError
from caravan_scheduler.core.errors import NoShardError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    source: AdapterSource
    loaded: LoadedAdapter


class ModelAdapters:
    """Loads and unloads adapters, one call at a time. ``close`` ends what it does by itself."""

    def __init__(
        self, replicas: Replicas, in_use: Callable[[], Collection[str]], give_up: Callable[[str], None]
    ) -> None:
        """``in_use`` returns the adapters of all requests; ``give_up`` ends those with an adapter that is lost."""
        self._replicas = replicas
        self._in_use = in_use
        self._give_up = give_up
        # By name.
        self._served: dict[str, _Held] = {}
        # By key: those that are freed when no request has them.
        self._leaving: dict[str, _Held] = {}
        self._being_freed: set[str] = set()
        self._turn = asyncio.Lock()
        self._freeing: asyncio.Task[None] | None = None
        self._loading: set[asyncio.Task[str]] = set()

    @property
    def names(self) -> Collection[str]:
        """The names that requests may use."""
        return self._served.keys()

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Those in the memory of each shard."""
        return tuple(held.loaded for held in (*self._served.values(), *self._leaving.values()))

    def accepts(self, key: str) -> bool:
        """Whether a request with this key may be queued."""
        is_served = any(held.loaded.key == key for held in self._served.values())
        return is_served or (key in self._leaving and key not in self._being_freed)

    async def load(self, source: AdapterSource, *, replaces: bool) -> str:
        """Load an adapter on every shard, or on none. Return why not, "" if it is served now. Raises NoShardError.

        Once begun, it goes on if the caller is cancelled: no shard may keep what the others have not.
        """
        loading = asyncio.create_task(self._load(source, replaces=replaces))
        self._loading.add(loading)
        loading.add_done_callback(self._loading.discard)
        return await asyncio.shield(loading)

    async def _load(self, source: AdapterSource, *, replaces: bool) -> str:
        async with self._turn:
            if source.name in self._served and not replaces:
                return (
                    "lora_name must not be that of a loaded adapter, unless load_inplace is set. "
                    f"Given: {source.name!r}"
                )
            links = self._leased()
            if not links:
                raise NoShardError(model=self._replicas.facts.name)
            answers = await asyncio.gather(*(_load(link, source) for link in links))
            keys = {answer.key for answer in answers if isinstance(answer, LoadedAdapter)}
            problem = _problem({link.address: answer for link, answer in zip(links, answers, strict=True)})
            if not problem and len(keys) > 1:
                problem = f"lora_path must be the same file on all shards. Given: {source.path!r}"
            if problem:
                for key in keys - {held.key for held in self.loaded}:
                    await self._free(key)
                return problem
            loaded = next(answer for answer in answers if isinstance(answer, LoadedAdapter))
            former = self._served.get(source.name)
            self._leaving.pop(loaded.key, None)
            if former is not None and former.loaded.key != loaded.key:
                self._leaving[former.loaded.key] = former
            self._served[source.name] = _Held(source, loaded)
            self._tell()
            _log.info("adapter loaded", extra={"model": self._replicas.facts.name, "adapter": source.name})
            return ""

    def unload(self, name: str) -> None:
        """Serve an adapter, one of ``names``, to no more requests."""
        held = self._served.pop(name)
        self._leaving[held.loaded.key] = held
        self._tell()
        _log.info("adapter unloaded", extra={"model": self._replicas.facts.name, "adapter": name})
        self.free_unused()

    async def bring(self, client: ShardCalls, epoch: int) -> None:
        """Load all on a shard that joins. Raises RefusedError, and ShardRpcError if the shard is lost."""
        async with self._turn:
            brought: set[str] = set()
            for held in list(self._served.values()):
                problem = await _bring(client, epoch, held, brought)
                if problem:
                    raise RefusedError(f"it cannot load adapter {held.source.name}: {problem}")
            for key, held in list(self._leaving.items()):
                if await _bring(client, epoch, held, brought):
                    # The file has other bytes by now, or is gone.
                    self._give_up(key)

    def free_unused(self) -> None:
        """Begin to free those that no request has any more. Call it from time to time."""
        if self._leaving and (self._freeing is None or self._freeing.done()):
            self._freeing = asyncio.create_task(self._free_unused())

    def close(self) -> None:
        """End what is under way."""
        for task in (*self._loading, *(() if self._freeing is None else (self._freeing,))):
            task.cancel()

    async def _free_unused(self) -> None:
        async with self._turn:
            for key in self._leaving.keys() - self._in_use():
                self._being_freed.add(key)
                try:
                    if await self._free(key):
                        del self._leaving[key]
                        self._tell()
                finally:
                    self._being_freed.discard(key)

    async def _free(self, key: str) -> bool:
        """Return whether no shard has it any more."""
        return all(await asyncio.gather(*(_unload(link, key) for link in self._leased())))

    def _leased(self) -> list[ShardLink]:
        return [link for link in self._replicas.links.values() if link.client is not None]

    def _tell(self) -> None:
        keys = {name: held.loaded.key for name, held in self._served.items()}
        self._replicas.set_loaded(keys, len(self.loaded))


async def _load(link: ShardLink, source: AdapterSource) -> LoadedAdapter | str:
    if link.client is None:
        return "it was lost"
    try:
        return await link.client.load_adapter(source, link.epoch)
    except ShardRpcError as error:
        return _reason(error)


def _problem(answers: Mapping[str, LoadedAdapter | str]) -> str:
    """Return why shards cannot load an adapter, "" if all have. ``answers``: by address."""
    reasons = {address: answer for address, answer in answers.items() if isinstance(answer, str)}
    if len(reasons) == len(answers) and len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{address}: {reason}" for address, reason in reasons.items())


def _reason(error: ShardRpcError) -> str:
    """Return what is wrong, without the status of gRPC if the shard has said it."""
    return str(error) if error.error is None else str(error).removeprefix(f"{error.error.status.name}: ")


async def _bring(client: ShardCalls, epoch: int, held: _Held, brought: set[str]) -> str:
    """Return why a shard has not the same adapter, "" if it has. ``brought``: keys of those that it has."""
    try:
        loaded = await client.load_adapter(held.source, epoch)
    except ShardRpcError as error:
        if error.error is not ShardError.BAD_REQUEST:
            raise
        return _reason(error)
    if loaded.key == held.loaded.key:
        brought.add(loaded.key)
        return ""
    if loaded.key not in brought:
        await client.unload_adapter(loaded.key, epoch)
    return f"the file of {adapter_name(held.loaded.key)} has other bytes than the one that the other shards have loaded"


async def _unload(link: ShardLink, key: str) -> bool:
    """Return whether the shard has it no more. One that is lost frees it with the lease."""
    if link.client is None:
        return True
    try:
        await link.client.unload_adapter(key, link.epoch)
    except ShardRpcError as error:
        return error.error is not ShardError.ADAPTER_IN_USE
    return True
