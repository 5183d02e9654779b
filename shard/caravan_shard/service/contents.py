"""Reads the files of a loaded model beside its work. Until it is done, nothing that was saved before is used."""

import asyncio
import logging
import os
import threading
from pathlib import Path
from time import monotonic

from caravan_models.contents import ChangedFileError, Contents, SeenFiles
from caravan_proto.messages.limits import Saving
from caravan_shard.config import ShardConfig
from caravan_shard.engine.engine import Engine
from caravan_shard.engine.replies import call_on
from caravan_shard.engine.worker import Worker
from caravan_shard.protocol.commands import KnowContents, StoredRun
from caravan_shard.protocol.results import Refusal
from caravan_shard.sequences.run_files import RunFiles

_log = logging.getLogger(__name__)

# What serves requests goes first.
_NICE = 19


class ContentsReader:
    """Lets the worker know what is in the files of its model, once a thread has read them. Made on the event loop."""

    def __init__(self, config: ShardConfig, worker: Worker, engine: Engine) -> None:
        self._config = config
        self._worker = worker
        self._backend = engine.backend
        self._runs = engine.runs
        self._ended = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._telling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless there is nothing to be read."""
        files = self._backend.contents.files
        if files is not None and not self._backend.contents.sha256:
            threading.Thread(target=self._read, args=(files,), name="contents", daemon=True).start()

    def end(self) -> None:
        """Let the thread end soon."""
        self._ended.set()

    def _read(self, files: SeenFiles) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        began = monotonic()
        try:
            contents = files.read(lambda: not self._ended.is_set())
        except (ChangedFileError, OSError) as error:
            _log.warning(
                "the model's files cannot be identified: saved runs are not used, and none is written to --cache-dir",
                extra={"error": str(error)},
            )
            return
        if contents is None:
            return
        _log.info(
            "the model's files were read",
            extra={
                "sha256": contents.model,
                "mib": sum(file.identity.size for file in files.all) >> 20,
                "seconds": round(monotonic() - began, 1),
            },
        )
        call_on(self._loop, self._begin_telling, contents, self._find_runs(contents))

    def _find_runs(self, contents: Contents) -> tuple[RunFiles, list[StoredRun]] | None:
        """Return the files of --cache-dir that the shard may use, and the runs in them."""
        if self._config.cache_dir_bytes == 0 or self._backend.capacity.current.saving is Saving.NOTHING:
            return None
        try:
            files = RunFiles(Path(self._config.cache_dir), self._backend.contents.state_fingerprint_of(contents))
            return files, list(files.scan())
        except OSError as error:
            _log.warning("cannot use --cache-dir", extra={"error": str(error)})
            return None

    def _begin_telling(self, contents: Contents, found: tuple[RunFiles, list[StoredRun]] | None) -> None:
        # A task of a loop that is about to close would never start.
        if not self._ended.is_set():
            self._telling = asyncio.create_task(self._tell(contents, found))

    async def _tell(self, contents: Contents, found: tuple[RunFiles, list[StoredRun]] | None) -> None:
        def use_saved() -> None:
            if found is not None:
                self._runs.use_files(*found)

        (result,) = await self._worker.submit(KnowContents(contents, use_saved)).next() or (None,)
        if isinstance(result, Refusal) and found is not None:
            found[0].close()
