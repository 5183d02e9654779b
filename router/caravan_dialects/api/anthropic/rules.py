"""Rules that only Anthropic's routes have."""

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.rules import shown


class ThreadError(ValidationError):
    """The request continues, or begins, a conversation that the server would have to keep.

    Anthropic's packages send ``thread`` by themselves, and find this error by its code: then they send all messages.
    """

    code = "thread_unsupported_request"

    def __init__(self, given: object) -> None:
        message = f"`thread` is not supported: leave it out, or send all `messages`. Given: {shown(given)}"
        super().__init__("thread", message)
