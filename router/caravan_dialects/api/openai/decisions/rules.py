"""Rules that only decisions have, one function each."""

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.rules import shown


def question_count_error(limit: int, given: int) -> ValidationError:
    return ValidationError("questions", f"`questions` must have 1 to {limit} entries. Given: {given}")


def prompt_tokens_error(limit: int, given: int) -> ValidationError:
    """The router keeps the prompt of each question, and of each token that a label goes on after."""
    message = f"`questions` and `input` must make prompts of at most {limit} tokens together. Given: {given}"
    return ValidationError("questions", message)


def option_count_error(field: str, low: int, high: int, given: int) -> ValidationError:
    return ValidationError(field, f"`{field}` must have {low} to {high} entries. Given: {given}")


def same_choice_error(field: str, given: str | bool) -> ValidationError:
    return ValidationError(field, f"`{field}` must differ from the values before it. Given: {shown(given)}")


def blank_error(field: str) -> ValidationError:
    return ValidationError(field, f"`{field}` must not be blank")


def format_version_error(known: int, given: int) -> ValidationError:
    message = f"`prompt_format_version` must be {known}, the one that this server asks questions in. Given: {given}"
    return ValidationError("prompt_format_version", message)
