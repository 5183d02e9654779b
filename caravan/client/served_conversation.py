"""A conversation on a server, with calls that block."""

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, Unpack

from caravan.client.async_served_conversation import AsyncServedConversation
from caravan.client.bodies import Input, RespondOptions
from caravan.client.client_thread import ClientThread
from caravan.client.outputs import ConversationExport, Item, Operation, Response, ResponsePart
from caravan.sampling_params import SamplingParams


class ServedConversation:
    """`AsyncServedConversation` with calls that block: the same calls with the same meaning."""

    def __init__(self, thread: ClientThread, served: AsyncServedConversation) -> None:
        self._thread = thread
        self._served = served

    def __repr__(self) -> str:
        return repr(self._served).removeprefix("Async")

    @property
    def id(self) -> str:
        """Its name on the server."""
        return self._served.id

    @property
    def head(self) -> str:
        """The place where it ended when the server answered, for ``if_match``."""
        return self._served.head

    @property
    def metadata(self) -> Mapping[str, str]:
        """Texts by name, which the server keeps with it."""
        return self._served.metadata

    @property
    def created_at(self) -> int:
        """Unix time in seconds."""
        return self._served.created_at

    def refresh(self) -> "ServedConversation":
        """See `AsyncServedConversation.refresh`."""
        return self._anew(self._served.refresh())

    def respond(
        self, given: Input, sampling_params: SamplingParams | None = None, **options: Unpack[RespondOptions]
    ) -> Response:
        """See `AsyncServedConversation.respond`."""
        return self._thread.run(self._served.respond(given, sampling_params, **options))

    def stream(
        self, given: Input, sampling_params: SamplingParams | None = None, **options: Unpack[RespondOptions]
    ) -> Iterator[ResponsePart]:
        """See `AsyncServedConversation.stream`."""
        return self._thread.iterate(self._served.stream(given, sampling_params, **options))

    def fork(self, at: str | None = None, *, metadata: Mapping[str, str] | None = None) -> "ServedConversation":
        """See `AsyncServedConversation.fork`."""
        return self._anew(self._served.fork(at, metadata=metadata))

    def rewind(
        self, *, to: str | None = None, turns: int | None = None, if_match: str | None = None
    ) -> "ServedConversation":
        """See `AsyncServedConversation.rewind`."""
        return self._anew(self._served.rewind(to=to, turns=turns, if_match=if_match))

    def shift(self, drop: int, *, keep: int = 0, if_match: str | None = None) -> "ServedConversation":
        """See `AsyncServedConversation.shift`."""
        return self._anew(self._served.shift(drop, keep=keep, if_match=if_match))

    def edit(self, operations: Sequence[Operation], *, if_match: str | None = None) -> "ServedConversation":
        """See `AsyncServedConversation.edit`."""
        return self._anew(self._served.edit(operations, if_match=if_match))

    def update(self, metadata: Mapping[str, str], *, if_match: str | None = None) -> "ServedConversation":
        """See `AsyncServedConversation.update`."""
        return self._anew(self._served.update(metadata, if_match=if_match))

    def items(self) -> list[Item]:
        """See `AsyncServedConversation.items`."""
        return self._thread.run(self._served.items())

    def add_items(self, items: Sequence[Item], *, if_match: str | None = None) -> list[Item]:
        """See `AsyncServedConversation.add_items`."""
        return self._thread.run(self._served.add_items(items, if_match=if_match))

    def item(self, item_id: str) -> Item:
        """See `AsyncServedConversation.item`."""
        return self._thread.run(self._served.item(item_id))

    def delete_item(self, item_id: str, *, if_match: str | None = None) -> "ServedConversation":
        """See `AsyncServedConversation.delete_item`."""
        return self._anew(self._served.delete_item(item_id, if_match=if_match))

    def export(self) -> ConversationExport:
        """See `AsyncServedConversation.export`."""
        return self._thread.run(self._served.export())

    def delete(self, *, if_match: str | None = None) -> None:
        """See `AsyncServedConversation.delete`."""
        self._thread.run(self._served.delete(if_match=if_match))

    def _anew(self, call: Coroutine[Any, Any, AsyncServedConversation]) -> "ServedConversation":
        return ServedConversation(self._thread, self._thread.run(call))
