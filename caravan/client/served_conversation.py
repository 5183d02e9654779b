"""A conversation on a server, with calls that block."""

from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from caravan.client.async_served_conversation import AsyncServedConversation
from caravan.twins import Twin, blocking, iterated, returning

_A = TypeVar("_A")
_P = ParamSpec("_P")


def served(
    method: Callable[Concatenate[_A, _P], Coroutine[Any, Any, AsyncServedConversation]],
) -> Callable[Concatenate[Twin[_A], _P], "ServedConversation"]:
    """Make a call that blocks and returns a conversation of a method that is awaited."""
    run = blocking(method)

    @wraps(method)
    def call(self: Twin[_A], /, *args: _P.args, **kwargs: _P.kwargs) -> "ServedConversation":
        return ServedConversation(run(self, *args, **kwargs), self._loop)

    return returning("ServedConversation", call)


class ServedConversation(Twin[AsyncServedConversation]):
    """`AsyncServedConversation` with calls that block: the same calls with the same meaning."""

    def __repr__(self) -> str:
        return repr(self._awaited).removeprefix("Async")

    @property
    def id(self) -> str:
        """Its name on the server."""
        return self._awaited.id

    @property
    def head(self) -> str:
        """The place where it ended when the server answered, for ``if_match``."""
        return self._awaited.head

    @property
    def metadata(self) -> Mapping[str, str]:
        """Texts by name, which the server keeps with it."""
        return self._awaited.metadata

    @property
    def created_at(self) -> int:
        """Unix time in seconds."""
        return self._awaited.created_at

    refresh = served(AsyncServedConversation.refresh)
    respond = blocking(AsyncServedConversation.respond)
    stream = iterated(AsyncServedConversation.stream)
    fork = served(AsyncServedConversation.fork)
    rewind = served(AsyncServedConversation.rewind)
    shift = served(AsyncServedConversation.shift)
    edit = served(AsyncServedConversation.edit)
    update = served(AsyncServedConversation.update)
    items = blocking(AsyncServedConversation.items)
    add_items = blocking(AsyncServedConversation.add_items)
    item = blocking(AsyncServedConversation.item)
    delete_item = served(AsyncServedConversation.delete_item)
    export = blocking(AsyncServedConversation.export)
    delete = blocking(AsyncServedConversation.delete)
