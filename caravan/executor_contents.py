"""What is in the files of an executor's model, which a thread reads beside its work."""

from concurrent.futures import Future
from threading import Event, Thread

from caravan.errors import StateError
from caravan_models.contents import ChangedFileError, Contents, SeenFiles
from caravan_shard.backends.base import Backend


class BackgroundContents:
    """Begins to read the files of ``backend``; nothing that was saved may be used before that is done."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ended = Event()
        self._found: Future[Contents] = Future()
        files = backend.contents.files
        if files is None:
            encoder = backend.media
            projector = "" if encoder is None else encoder.facts.fingerprint.hex()
            self._found.set_result(Contents(model=backend.contents.sha256, projector=projector))
        else:
            Thread(target=self._read, args=(files,), name="contents", daemon=True).start()

    def known(self) -> Contents:
        """Wait until the files are read; return what is in them. Raises StateError if they have changed."""
        contents = self._found.result()
        if not self._backend.contents.sha256:
            self._backend.contents.know(contents)
        return contents

    def end(self) -> None:
        """Let the thread end soon."""
        self._ended.set()

    def _read(self, files: SeenFiles) -> None:
        try:
            contents = files.read(lambda: not self._ended.is_set())
        except (ChangedFileError, OSError) as error:
            self._found.set_exception(StateError(f"conversations cannot be saved or restored: {error}"))
            return
        if contents is not None:
            self._found.set_result(contents)
