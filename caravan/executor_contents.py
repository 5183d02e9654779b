"""What is in the files of an executor's model, which a thread reads beside its work."""

from concurrent.futures import Future
from threading import Event, Thread

from caravan.errors import StateError
from caravan_models.contents import ChangedFileError, Contents
from caravan_shard.backends.base import Backend


class BackgroundContents:
    """Begins to read the files of ``backend``; nothing that was saved may be used before that is done."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ended = Event()
        self._found: Future[Contents] = Future()
        files = backend.files
        if files is None:
            encoder = backend.media
            projector = "" if encoder is None else encoder.facts.fingerprint.hex()
            self._found.set_result(Contents(model=backend.facts.sha256, projector=projector))
        else:
            Thread(target=self._read, name="contents", daemon=True).start()

    def known(self) -> Contents:
        """Wait until the files are read; return what is in them. Raises StateError if they have changed."""
        contents = self._found.result()
        if self._backend.files is not None and not self._backend.state_fingerprint:
            self._backend.know_contents(contents)
        return contents

    def end(self) -> None:
        """Let the thread end soon."""
        self._ended.set()

    def _read(self) -> None:
        assert self._backend.files is not None
        try:
            contents = self._backend.files.read(lambda: not self._ended.is_set())
        except (ChangedFileError, OSError) as error:
            self._found.set_exception(StateError(f"conversations cannot be saved or restored: {error}"))
            return
        if contents is not None:
            self._found.set_result(contents)
