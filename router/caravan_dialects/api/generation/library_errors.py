"""What an operator's client gets when the library cannot do something."""

from collections.abc import Iterator
from contextlib import contextmanager

from caravan_dialects.api.errors import LibraryFailedError, LibraryRefusalError
from caravan_scheduler.core.library import LibraryError, LibraryFaultError


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn the library's errors into the client's. Raises LibraryRefusalError, LibraryFailedError."""
    try:
        yield
    except LibraryFaultError as error:
        raise LibraryFailedError(str(error)) from None
    except LibraryError as error:
        raise LibraryRefusalError(str(error)) from None
