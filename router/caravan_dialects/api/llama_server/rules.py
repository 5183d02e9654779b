"""Rules that only llama-server's routes have."""

from caravan_dialects.api.errors import ValidationError


def infill_error(model: str) -> ValidationError:
    message = f"{model} cannot fill in the middle of a text: its vocabulary has no tokens for that"
    return ValidationError("", message)


def too_many_extra_parts_error(limit: int, given: int) -> ValidationError:
    return ValidationError("input_extra", f"`input_extra` may have at most {limit} entries. Given: {given}")
