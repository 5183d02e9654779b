"""Loads adapters for the router that holds the shard, and frees them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from caravan_models.contents import ChangedFileError, SeenFile, SeenFiles
from caravan_proto.host_memory import available_memory
from caravan_proto.messages.adapters import AdapterSource, LoadedAdapter, adapter_key, source_problem
from caravan_shard.config import ShardConfig
from caravan_shard.engine.worker import ENDING, Worker
from caravan_shard.protocol.commands import LoadAdapter, UnloadAdapter
from caravan_shard.protocol.results import AdapterUnloaded, Refusal, bad_request
from caravan_shard.service.lease import ShardLease
from caravan_shard.service.model_calls import ModelCalls


class AdapterService:
    """Runs on the event loop. Files are read on a thread of their own; the model's thread loads them."""

    def __init__(self, config: ShardConfig, worker: Worker, lease: ShardLease, calls: ModelCalls) -> None:
        self._folder = config.lora_dir
        self._most = config.max_loras
        self._worker = worker
        self._lease = lease
        self._calls = calls
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(1, "adapters")
        # Paths anywhere, which the program around the shard is loading.
        self._allowed: list[str] = []

    @contextmanager
    def allowing(self, path: str) -> Iterator[None]:
        """Let the file at ``path``, an absolute one, be loaded meanwhile, whatever folder it is in."""
        self._allowed.append(path)
        try:
            yield
        finally:
            self._allowed.remove(path)

    def close(self) -> None:
        """Let the thread end soon."""
        self._ended.set()
        self._pool.shutdown(wait=False)

    async def load(self, source: AdapterSource, epoch: int) -> LoadedAdapter | Refusal:
        """Load an adapter until it is unloaded or the lease ends."""
        refusal = self._lease.check(epoch)
        if refusal is not None:
            return refusal
        command = await self._calls.run(self._pool, self._read, source)
        if isinstance(command, Refusal):
            return command
        # The lease may have ended meanwhile.
        refusal = self._lease.check(epoch)
        if refusal is not None:
            return refusal
        (result,) = await self._worker.submit(command).next() or (None,)
        assert isinstance(result, LoadedAdapter | Refusal), f"{result} is no answer to this command"
        return result

    async def unload(self, key: str, epoch: int) -> AdapterUnloaded | Refusal:
        """Free an adapter, unless a sequence with it has not ended."""
        refusal = self._lease.check(epoch)
        if refusal is not None:
            return refusal
        (result,) = await self._worker.submit(UnloadAdapter(key)).next() or (None,)
        assert isinstance(result, AdapterUnloaded | Refusal), f"{result} is no answer to this command"
        return result

    def _read(self, source: AdapterSource) -> LoadAdapter | Refusal:
        """Find the file and read all of it, since every byte is a part of the key."""
        problem = source_problem(source)
        if problem:
            return bad_request(problem)
        folder = "/" if source.path in self._allowed else self._folder
        if not folder:
            return bad_request("adapters may not be loaded here: the shard runs without --lora-dir")
        given = repr(source.path[:256])
        try:
            inside = Path(folder).resolve(strict=True)
            # Links are followed first: what they lead to must be in the folder, too.
            path = (inside / source.path).resolve(strict=True)
            if not (path.is_relative_to(inside) and path.is_file()):
                return bad_request(f"lora_path must be a file in the folder of --lora-dir. Given: {given}")
            file = SeenFile.at(path)
            free = available_memory()
            if free is not None and file.identity.size > free:
                return bad_request(
                    f"lora_path must fit into the host's memory, of which {free} bytes are free. Given: {given} with "
                    f"{file.identity.size} bytes"
                )
            contents = SeenFiles(model=(file,)).read(lambda: not self._ended.is_set())
        except (OSError, ChangedFileError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is being changed"
            return bad_request(f"lora_path cannot be read: {reason}. Given: {given}")
        if contents is None:
            return ENDING
        return LoadAdapter(adapter_key(source, contents.model), file, source.scale, self._most)
