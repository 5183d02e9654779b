"""Errors of the router's layers become those of the package."""

import pytest

import caravan
from caravan.valid_requests import named_errors
from caravan_dialects.api.generation.rules import (
    PromptTooLongError,
    PromptTooManyBytesError,
    TotalTooLongError,
    empty_prompt_error,
)
from caravan_scheduler.core.errors import DeadlineError, GenerationError, TextTooLongError

ERRORS = [
    (empty_prompt_error("prompt"), caravan.RequestError, "p: `prompt` cannot be empty"),
    (
        PromptTooLongError("prompt", 255, 256, 256),
        caravan.ContextLengthError,
        "p: `prompt` must have at most 255 tokens",
    ),
    (
        PromptTooManyBytesError("prompt", 9, 10, 256),
        caravan.ContextLengthError,
        "p: `prompt` must have at most 9 bytes",
    ),
    (
        TotalTooLongError("prompt", "max_tokens", 9, 8, 2),
        caravan.ContextLengthError,
        "p: `prompt` tokens [+] `max_tokens`",
    ),
    (TextTooLongError("text must have"), caravan.ContextLengthError, "p: text must have"),
    (caravan.ContextLengthError("long"), caravan.ContextLengthError, "p: long"),
    (DeadlineError("late"), caravan.DeadlineError, "late"),
    (GenerationError("lost"), caravan.GenerationError, "lost"),
]


@pytest.mark.parametrize(("error", "kind", "message"), ERRORS)
def test_each_error_has_a_type(error: Exception, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}") as found, named_errors("p: "):
        raise error
    assert type(found.value) is kind
