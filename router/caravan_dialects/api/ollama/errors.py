"""Ollama's error envelope: ``{"error": MESSAGE}`` with OpenAI's statuses. TGI's ``error_type`` is added."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from caravan_dialects.api.error_table import Dialect, kind_of, message_of
from caravan_dialects.api.errors import CatalogueFailedError, CatalogueRefusalError
from caravan_dialects.api.generation.rules import PromptTooLongError, PromptTooManyBytesError
from caravan_dialects.api.openai.errors import openai_status
from caravan_dialects.api.tgi.errors import TGI, ErrorBody
from caravan_scheduler.core.catalogue import CatalogueError, CatalogueFaultError

_CHAT = "prompt too long; exceeded max context length"
_VECTORS = "the input length exceeds the context length"


def _message(error: Exception) -> str:
    """Return the sentence that clients see. They know those of Ollama for what does not fit the context."""
    match error:
        case PromptTooLongError(field=field, limit=limit, given=given, total=None):
            return f"{_VECTORS}: `{field}` must have at most {limit} tokens. Given: {given}"
        case PromptTooLongError(field=field, limit=limit, given=given):
            return f"{_CHAT} by {given - limit} tokens: `{field}` must have at most {limit} tokens. Given: {given}"
        case PromptTooManyBytesError(field=field, limit=limit, given=given):
            return f"{_CHAT}: `{field}` must have at most {limit} bytes. Given: {given}"
        case _:
            return message_of(error)


def _body(error: Exception, _request_id: str) -> bytes:
    return msgspec.json.encode(ErrorBody(_message(error), kind_of(error).error_type))


OLLAMA = Dialect(name="Ollama", envelope=TGI.envelope, status=openai_status, body=_body)


@contextmanager
def catalogue_errors() -> Iterator[None]:
    """Turn the catalogue's errors into the client's. Raises CatalogueRefusalError, CatalogueFailedError."""
    try:
        yield
    except CatalogueFaultError as error:
        raise CatalogueFailedError(str(error)) from None
    except CatalogueError as error:
        raise CatalogueRefusalError(str(error)) from None
