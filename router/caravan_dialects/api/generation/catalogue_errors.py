"""What an operator's client gets when the catalogue cannot do something."""

from collections.abc import Iterator
from contextlib import contextmanager

from caravan_dialects.api.errors import CatalogueFailedError, CatalogueRefusalError
from caravan_scheduler.core.catalogue import CatalogueError, CatalogueFaultError


@contextmanager
def catalogue_errors() -> Iterator[None]:
    """Turn the catalogue's errors into the client's. Raises CatalogueRefusalError, CatalogueFailedError."""
    try:
        yield
    except CatalogueFaultError as error:
        raise CatalogueFailedError(str(error)) from None
    except CatalogueError as error:
        raise CatalogueRefusalError(str(error)) from None
