"""Rules of responses and conversations, one function each."""

from collections.abc import Sequence

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.rules import shown


def item_type_error(field: str, given: object) -> ValidationError:
    return ValidationError(field, f"`{field}` must be the type of an item, a text. Given: {shown(given)}")


def ambiguous_tool_error(name: str) -> ValidationError:
    field = "tool_choice.namespace"
    return ValidationError(field, f"`{field}` must be set: several namespaces have a tool {shown(name)}")


def unknown_server_error(field: str, known: Sequence[str], given: str) -> ValidationError:
    known_ones = ", ".join(known) or "none, since the router was started without --mcp-config"
    message = f"`{field}` must be an MCP server that is configured here: {known_ones}. Given: {shown(given)}"
    return ValidationError(field, message)


def repeated_server_error(field: str, given: str) -> ValidationError:
    return ValidationError(field, f"`{field}` must be another one than that of other tools. Given: {shown(given)}")


def too_many_items_error(field: str, limit: int, given: int) -> ValidationError:
    message = f"`{field}` must have at most {limit} items, including those of earlier turns. Given: {given}"
    return ValidationError(field, message)


def items_size_error(field: str, limit: int) -> ValidationError:
    return ValidationError(field, f"`{field}` must have at most {limit} bytes, including the items of earlier turns")


def unknown_item_error(field: str, given: object) -> ValidationError:
    """An item is named that the conversation does not have."""
    return ValidationError(field, f"`{field}` names no item of the conversation. Given: {shown(given)}")


def repeated_item_error(field: str, given: str) -> ValidationError:
    return ValidationError(field, f"`{field}` must be unique, and another item has it. Given: {shown(given)}")


def one_of_fields_error(first: str, second: str) -> ValidationError:
    return ValidationError(second, f"either `{first}` or `{second}` must be set, not both")


def two_contexts_error() -> ValidationError:
    return ValidationError("previous_response_id", "`previous_response_id` and `conversation` cannot be used together")


def needs_background_error(window: object) -> ValidationError:
    field = "background_options.completion_window"
    return ValidationError(field, f'`{field}` must be "soonest" without `background`. Given: {shown(window)}')


def background_needs_store_error() -> ValidationError:
    return ValidationError("background", "`background` needs `store`, which must not be false")


def starting_after_error(given: str) -> ValidationError:
    field = "starting_after"
    return ValidationError(field, f"`{field}` must be the sequence_number of an event. Given: {shown(given)}")


def metadata_error() -> ValidationError:
    """OpenAI's rule."""
    message = "`metadata` must have at most 16 keys. A key may have 64 characters, its text 512"
    return ValidationError("metadata", message)


def event_type_error(given: str) -> ValidationError:
    return ValidationError("type", f"`type` must be response.create or response.steer. Given: {shown(given)}")


def background_on_socket_error() -> ValidationError:
    return ValidationError("background", "`background` cannot be used over WebSocket: send POST /v1/responses")


def steering_empty_error() -> ValidationError:
    return ValidationError("input", "`input` must not be empty")


def steering_item_error(field: str) -> ValidationError:
    message = f"`{field}` must be a message of the user, with no other fields than type, role and content"
    return ValidationError(field, message)
