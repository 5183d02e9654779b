"""What a backend knows of the bytes in its files, and what its states are called therefore."""

from collections.abc import Callable

from caravan_models.contents import Contents, SeenFiles


class FileContents:
    """What is in the files that a backend was loaded from, once somebody has read them.

    ``files``: as they were before they were loaded; None if there are none to be read. ``sha256``: see `ModelFile`.
    ``state_fingerprint``: the hexadecimal name of everything that decides what states mean: states of an equal one can
    be restored. Both are empty as long as it is not known: nothing that was saved before may be used then.
    """

    def __init__(self, files: SeenFiles | None, state_fingerprint_of: Callable[[Contents], str]) -> None:
        """``state_fingerprint_of`` returns the fingerprint for these contents; any thread may call it."""
        self.files = files
        self.state_fingerprint_of = state_fingerprint_of
        self.sha256 = self.state_fingerprint = ""
        if files is not None and (known := files.known()) is not None:
            self.know(known)

    def know(self, contents: Contents) -> None:
        """Note what is in the files."""
        self.sha256 = contents.model
        self.state_fingerprint = self.state_fingerprint_of(contents)
