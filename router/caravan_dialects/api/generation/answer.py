"""What a dialect answers to a valid request: a whole reply, or the messages of a stream, as bytes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from caravan_dialects.api.generation.request import ValidRequest
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.stream import Events


class Answer(ABC):
    """The answer to one request: either `whole`, or `send` of each run and then `last_event`.

    ``requests``: what is generated. The runs of each come in this order.
    """

    def __init__(self, requests: Sequence[ValidRequest]) -> None:
        self.requests = requests

    @abstractmethod
    async def whole(self, runs: Sequence[Run]) -> bytes:
        """Read all runs and return the JSON body. Raises EngineError."""

    async def send(self, events: Events, index: int, run: Run) -> None:
        """Stream one run. Raises EngineError. Answers that are never streamed do not implement it."""
        raise NotImplementedError

    def last_event(self, runs: Sequence[Run]) -> bytes | None:
        """Return the JSON of the event after all runs have ended well; None if there is none."""
        return None
