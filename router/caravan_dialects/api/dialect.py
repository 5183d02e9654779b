"""How the clients of one API family expect errors."""

from collections.abc import Callable
from dataclasses import dataclass

from caravan_dialects.api.errors import ErrorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API family: TGI's, OpenAI's, Ollama's, Anthropic's, Google's.

    ``status`` returns the HTTP status of an error, ``body`` its JSON body of type ``envelope``; its second argument is
    the id of the request, "" if it has none. ``id_header``: header in which clients look for that id, beside the one
    that every reply has. ``key_parameter``: the parameter of a URL in which clients may send their key.
    """

    name: str
    envelope: type
    status: Callable[[ErrorKind], int]
    body: Callable[[Exception, str], bytes]
    id_header: str | None = None
    key_parameter: str | None = None
