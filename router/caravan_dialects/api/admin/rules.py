"""Rules that only the routes for operators have, one function each."""

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.rules import shown


def pin_limit_error(limit_bytes: int, given_bytes: int) -> ValidationError:
    """Together, pinned prefixes would take more than half of a shard's memory for saved prefixes."""
    return ValidationError(
        "",
        f"all pinned prefixes together may take {limit_bytes} bytes, half of the smallest shard's memory for saved "
        f"prefixes (--cache-ram). With this one, they would take {given_bytes}",
    )


def short_pin_error(limit: int, given: int) -> ValidationError:
    return ValidationError("", f"a prefix that is pinned must have at least {limit} tokens. Given: {given}")


def pin_source_error(given: str) -> ValidationError:
    return ValidationError("", f"the body must have exactly one of `prompt` and `messages`. Given: {given}")


def pin_field_error(field: str, given: object) -> ValidationError:
    return ValidationError(field, f"`{field}` goes with `messages` only. Given: {shown(given)}")


def tenant_error(given: str) -> ValidationError:
    return ValidationError("tenant", f"`tenant` must be the name of an API key. Given: {shown(given)}")


def unknown_parameter_error(known: str, given: str) -> ValidationError:
    """The URL has an unknown parameter. Other routes ignore it; here a misspelt ``shard`` would affect all shards."""
    return ValidationError(given, f"the URL may have the parameter `{known}` only. Given: {shown(given)}")


def adapter_error(problem: str) -> ValidationError:
    """An adapter cannot be loaded. ``problem``: why, with the field if it is one."""
    field = next((field for field in ("lora_path", "lora_name", "scale") if field in problem), "")
    return ValidationError(field, problem)
