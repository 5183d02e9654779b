"""Rules of responses and conversations, one error class each."""

from caravan_router.http.generation.rules import shown
from caravan_router.http.server.errors import ValidationError


class UnsupportedItemError(ValidationError):
    def __init__(self, field: str, given: object) -> None:
        super().__init__(field, f"items of this `type` are not supported. Given: {shown(given)} in `{field}`")


class TooManyItemsError(ValidationError):
    def __init__(self, field: str, limit: int, given: int) -> None:
        super().__init__(field, f"`{field}` must have at most {limit} items, with those before. Given: {given}")


class ItemsSizeError(ValidationError):
    def __init__(self, field: str, limit: int) -> None:
        super().__init__(field, f"`{field}` must have at most {limit} bytes, with the items before")


class UnknownItemError(ValidationError):
    """An item is named that the conversation does not have."""

    def __init__(self, field: str, given: object) -> None:
        super().__init__(field, f"`{field}` names no item of the conversation. Given: {shown(given)}")


class RepeatedItemError(ValidationError):
    def __init__(self, field: str, given: str) -> None:
        super().__init__(field, f"`{field}` must be no other item's. Given: {shown(given)}")


class OneOfFieldsError(ValidationError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(second, f"either `{first}` or `{second}` must be set, not both")


class TwoContextsError(ValidationError):
    def __init__(self) -> None:
        super().__init__("previous_response_id", "`previous_response_id` and `conversation` cannot be used together")


class MetadataError(ValidationError):
    """OpenAI's rule."""

    def __init__(self) -> None:
        super().__init__(
            "metadata", "`metadata` must have at most 16 keys of at most 64 characters and texts of at most 512"
        )
