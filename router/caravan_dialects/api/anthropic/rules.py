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


def params_error(field: str, given: bytes) -> ValidationError:
    return ValidationError(field, f"`{field}` must be an object. Given: {shown(given.decode(errors='replace'))}")


def custom_id_error(field: str, most: int, given: int) -> ValidationError:
    return ValidationError(field, f"`{field}` must have 1 to {most} characters. Given: {given}")


def repeated_custom_id_error(field: str, given: str) -> ValidationError:
    return ValidationError(field, f"`{field}` must be unique. Given twice: {shown(given)}")
