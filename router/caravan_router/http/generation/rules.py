"""Rules that several dialects share, one error class each. A message names the field, the limit and the value given."""

from caravan_router.http.server.errors import ValidationError

_SHOWN_CHARACTERS = 80
_REASON_CHARACTERS = 300


def shown(value: object) -> str:
    """Return a client's value as bounded text on one line: it goes back to the client and into the log."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


class UnsupportedFieldError(ValidationError):
    """The field is known but not supported; ``neutral`` says what is accepted instead."""

    def __init__(self, field: str, neutral: str, given: object) -> None:
        super().__init__(field, f"`{field}` is not supported: leave it out, or {neutral}. Given: {shown(given)}")


class NotStrictlyPositiveError(ValidationError):
    def __init__(self, field: str, given: float) -> None:
        super().__init__(field, f"`{field}` must be strictly positive. Given: {shown(given)}")


class OutOfRangeError(ValidationError):
    def __init__(self, field: str, low: float, high: float, given: float) -> None:
        super().__init__(field, f"`{field}` must be >= {low} and <= {high}. Given: {shown(given)}")


class NotBetweenZeroAndOneError(ValidationError):
    """TGI excludes both ends. Leaving the field out switches the filter off."""

    def __init__(self, field: str, given: float) -> None:
        super().__init__(field, f"`{field}` must be > 0.0 and < 1.0. Given: {shown(given)}")


class CandidatesError(ValidationError):
    """``n`` or ``best_of`` is out of range. The message is TGI's."""

    def __init__(self, field: str, limit: int, given: int) -> None:
        super().__init__(field, f"`{field}` must be > 0 and <= {limit}. Given: {shown(given)}")


class PriorityError(ValidationError):
    def __init__(self, field: str, limit: int, given: int) -> None:
        super().__init__(field, f"`{field}` may be at most {limit} with this API key. Given: {given}")


class CacheSaltError(ValidationError):
    def __init__(self, limit_bytes: int, given_bytes: int) -> None:
        message = f"`cache_salt` must have 1 to {limit_bytes} bytes. Given: {given_bytes}"
        super().__init__("cache_salt", message)


class HeaderError(ValidationError):
    def __init__(self, header: str, expected: str, given: str) -> None:
        super().__init__(header, f"header `{header}` must be {expected}. Given: {shown(given)}")


class TooManyStopsError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        super().__init__("stop", f"`stop` supports up to {limit} stop sequences. Given: {given}")


class EmptyStopError(ValidationError):
    def __init__(self) -> None:
        super().__init__("stop", '`stop` must not contain empty strings. Given: ""')


class StopTooLongError(ValidationError):
    def __init__(self, limit_bytes: int, given_bytes: int) -> None:
        super().__init__("stop", f"`stop` sequences must have at most {limit_bytes} bytes. Given: {given_bytes}")


class EmptyPromptError(ValidationError):
    def __init__(self, field: str) -> None:
        super().__init__(field, f"`{field}` cannot be empty")


class TooManyBytesError(ValidationError):
    def __init__(self, field: str, limit: int, given: int) -> None:
        super().__init__(field, f"`{field}` must have at most {limit} bytes. Given: {given}")


class PromptTooLongError(ValidationError):
    """The prompt is too long. The message is TGI's, although exactly ``limit`` tokens are allowed."""

    def __init__(self, field: str, limit: int, given: int) -> None:
        super().__init__(field, f"`{field}` must have less than {limit} tokens. Given: {given}")


class TotalTooLongError(ValidationError):
    def __init__(self, field: str, new_field: str, limit: int, given: int, given_new: int) -> None:
        message = (
            f"`{field}` tokens + `{new_field}` must be <= {limit}. "
            f"Given: {given} `{field}` tokens and {given_new} `{new_field}`"
        )
        super().__init__(field, message)


class TooManyNewTokensError(ValidationError):
    """All generations of a request together may generate too many tokens."""

    def __init__(self, field: str, limit: int, given: int) -> None:
        message = f"`{field}` times the number of generations must be <= {limit} tokens. Given: {given}"
        super().__init__(field, message)


class InvalidGrammarError(ValidationError):
    """The constraint cannot be used. The message is TGI's, with the field's name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, f"{field} is not valid: {problem[:_REASON_CHARACTERS]}")


class TooManyPromptsError(ValidationError):
    def __init__(self, field: str, limit: int, given: int) -> None:
        message = f"Number of prompts exceeds the maximum allowed batch size of {limit}. Given: {given}"
        super().__init__(field, message)


class TokenIdError(ValidationError):
    def __init__(self, field: str, vocabulary_size: int, given: int) -> None:
        super().__init__(field, f"`{field}` token ids must be >= 0 and < {vocabulary_size}. Given: {shown(given)}")
