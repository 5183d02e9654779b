"""The adapters that are loaded while the shard runs. They belong to the lease, and are freed with it."""

from collections.abc import Callable, Collection
from dataclasses import replace

from caravan_proto.errors import ShardError
from caravan_proto.messages.adapters import LoadedAdapter, adapter_name
from caravan_proto.messages.model import ModelFile
from caravan_shard.adapter_file import AdapterFile
from caravan_shard.backends.base import Backend
from caravan_shard.protocol.commands import LoadAdapter
from caravan_shard.protocol.results import AdapterUnloaded, Refusal, bad_request


class LeasedAdapters:
    """Loads and frees adapters. Only the worker's thread calls it."""

    def __init__(self, backend: Backend, in_use: Callable[[], Collection[str]]) -> None:
        """``in_use`` returns the adapters of the sequences that have not ended."""
        self._backend = backend
        self._in_use = in_use
        self._loaded: dict[str, LoadedAdapter] = {}

    @property
    def facts(self) -> ModelFile:
        """The model's facts, with all adapters that sequences may name."""
        facts = self._backend.facts
        return replace(facts, adapters=(*facts.adapters, *self._loaded)) if self._loaded else facts

    def load(self, command: LoadAdapter) -> LoadedAdapter | Refusal:
        """Load an adapter, unless it is loaded."""
        if (known := self._loaded.get(command.key)) is not None:
            return known
        name, path = adapter_name(command.key), command.file.path
        if len(self._loaded) >= command.most:
            return bad_request(
                f"--max-loras allows {command.most} adapters at a time, and as many are loaded. Given: {name!r}"
            )
        problem = self._backend.adapters.load(command.key, AdapterFile(name, path, command.scale))
        if problem:
            return bad_request(problem)
        if not command.file.is_there:
            # What was loaded may not be what was read for the key.
            self._backend.adapters.unload(command.key)
            return bad_request(f"lora_path must not change while it is loaded. Given: {str(path)!r}")
        loaded = LoadedAdapter(key=command.key, size_bytes=command.file.identity.size)
        self._loaded[command.key] = loaded
        return loaded

    def unload(self, key: str) -> AdapterUnloaded | Refusal:
        """Free an adapter. One that is not loaded is gone."""
        if key in self._in_use():
            return Refusal(ShardError.ADAPTER_IN_USE, f"sequences with adapter {adapter_name(key)!r} have not ended")
        if self._loaded.pop(key, None) is not None:
            self._backend.adapters.unload(key)
        return AdapterUnloaded()

    def drop(self) -> None:
        """Free all."""
        for key in self._loaded:
            self._backend.adapters.unload(key)
        self._loaded.clear()
