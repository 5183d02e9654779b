"""Rules that several dialects share, one function each. A message names the field, the limit and the value given."""

from caravan_dialects.api.errors import ContextLengthError, ValidationError

_SHOWN_CHARACTERS = 80
_REASON_CHARACTERS = 300


def shown(value: object) -> str:
    """Return a client's value as bounded text on one line: it goes back to the client and into the log."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def embedding_model_error(model: str, *, ranks: bool) -> ValidationError:
    """The model embeds texts, or ranks documents, and can do nothing else."""
    can = "ranks documents: use /v1/rerank or /v1/score" if ranks else "embeds texts: use /v1/embeddings"
    return ValidationError("", f"{shown(model)} cannot generate text, it only {can}")


def unsupported_field_error(field: str, neutral: str, given: object) -> ValidationError:
    """The field is known but not supported; ``neutral`` says what is accepted instead."""
    return ValidationError(field, f"`{field}` is not supported: leave it out, or {neutral}. Given: {shown(given)}")


def not_strictly_positive_error(field: str, given: float) -> ValidationError:
    return ValidationError(field, f"`{field}` must be strictly positive. Given: {shown(given)}")


def out_of_range_error(field: str, low: float, high: float, given: float) -> ValidationError:
    return ValidationError(field, f"`{field}` must be >= {low} and <= {high}. Given: {shown(given)}")


def not_between_zero_and_one_error(field: str, given: float) -> ValidationError:
    """TGI excludes both ends. Leaving the field out switches the filter off."""
    return ValidationError(field, f"`{field}` must be > 0.0 and < 1.0. Given: {shown(given)}")


def candidates_error(field: str, limit: int, given: int) -> ValidationError:
    """``n`` or ``best_of`` is out of range. The message is TGI's."""
    return ValidationError(field, f"`{field}` must be > 0 and <= {limit}. Given: {shown(given)}")


def priority_error(field: str, limit: int, given: int) -> ValidationError:
    return ValidationError(field, f"`{field}` may be at most {limit} with this API key. Given: {given}")


def cache_salt_error(limit_bytes: int, given_bytes: int) -> ValidationError:
    message = f"`cache_salt` must have 1 to {limit_bytes} bytes. Given: {given_bytes}"
    return ValidationError("cache_salt", message)


def session_id_error(limit: int, given: str) -> ValidationError:
    """The id may be a secret, so it is not repeated."""
    count = f"{len(given)}" if given.isprintable() else f"{len(given)}, not all printable"
    return ValidationError("session_id", f"`session_id` must have 1 to {limit} printable characters. Given: {count}")


def header_error(header: str, expected: str, given: str) -> ValidationError:
    return ValidationError(header, f"header `{header}` must be {expected}. Given: {shown(given)}")


def too_many_stops_error(limit: int, given: int) -> ValidationError:
    return ValidationError("stop", f"`stop` supports up to {limit} stop sequences. Given: {given}")


def empty_stop_error() -> ValidationError:
    return ValidationError("stop", '`stop` must not contain empty strings. Given: ""')


def stop_too_long_error(limit_bytes: int, given_bytes: int) -> ValidationError:
    return ValidationError("stop", f"`stop` sequences must have at most {limit_bytes} bytes. Given: {given_bytes}")


def empty_prompt_error(field: str) -> ValidationError:
    return ValidationError(field, f"`{field}` cannot be empty")


class TooManyBytesError(ValidationError):
    def __init__(self, field: str, limit: int, given: int) -> None:
        super().__init__(field, f"`{field}` must have at most {limit} bytes. Given: {given}")


class PromptTooLongError(ContextLengthError):
    """Exactly ``limit`` tokens are allowed.

    ``total``: most tokens of the prompt and its output together; None if nothing is generated after it.
    """

    def __init__(self, field: str, limit: int, given: int, total: int | None) -> None:
        # Each dialect has words of its own for these errors.
        super().__init__(field, f"`{field}` must have at most {limit} tokens. Given: {given}")
        self.limit = limit
        self.given = given
        self.total = total


class PromptTooManyBytesError(ContextLengthError):
    """The prompt is so long that it is refused before its tokens are counted. ``total``: see `PromptTooLongError`."""

    def __init__(self, field: str, limit: int, given: int, total: int) -> None:
        super().__init__(field, f"`{field}` must have at most {limit} bytes. Given: {given}")
        self.limit = limit
        self.given = given
        self.total = total


class TotalTooLongError(ContextLengthError):
    """The prompt and its output are too long together. The message is TGI's."""

    def __init__(self, field: str, new_field: str, limit: int, given: int, given_new: int) -> None:
        message = (
            f"`{field}` tokens + `{new_field}` must be <= {limit}. "
            f"Given: {given} `{field}` tokens and {given_new} `{new_field}`"
        )
        super().__init__(field, message)
        self.new_field = new_field
        self.limit = limit
        self.given = given
        self.given_new = given_new


def too_many_new_tokens_error(field: str, limit: int, given: int) -> ValidationError:
    """All generations of a request together may generate too many tokens."""
    message = f"`{field}` times the number of generations must be <= {limit} tokens. Given: {given}"
    return ValidationError(field, message)


def invalid_grammar_error(field: str, problem: str) -> ValidationError:
    """The constraint cannot be used. The message is TGI's, with the field's name."""
    return ValidationError(field, f"{field} is not valid: {problem[:_REASON_CHARACTERS]}")


def too_many_prompts_error(field: str, limit: int, given: int) -> ValidationError:
    message = f"Number of prompts exceeds the maximum allowed batch size of {limit}. Given: {given}"
    return ValidationError(field, message)


def not_text_error(field: str, kind: str, why: str) -> ValidationError:
    return ValidationError(field, f"`{field}` must be text: {why}. Given: type {shown(kind)}")


def data_url_error(field: str, given: str) -> ValidationError:
    message = (
        f"`{field}` must be a URL of the form `data:image/png;base64,…`, which contains the image: nothing is "
        f"fetched. Given: {shown(given)}"
    )
    return ValidationError(field, message)


def media_file_error(field: str, problem: str) -> ValidationError:
    """``problem``: what is wrong with the file of a picture or a sound, as its decoder says it."""
    return ValidationError(field, f"`{field}` {problem}")


def media_size_error(field: str, limit_bytes: int, given_bytes: int) -> ValidationError:
    """The medium is larger than shards take."""
    message = f"`{field}` must have at most {limit_bytes} bytes when it is decoded. Given: {given_bytes}"
    return ValidationError(field, message)


def no_prompt_embeds_error(field: str) -> ValidationError:
    message = f"`{field}` cannot be used here: it needs shards that were started with --enable-prompt-embeds"
    return ValidationError(field, message)


def row_size_error(field: str, size: int, given: int) -> ValidationError:
    """Embeddings are those of another model."""
    return ValidationError(field, f"`{field}` must have {size} values for each token. Given: {given}")


def too_many_media_error(field: str, limit: int, given: int) -> ValidationError:
    """``field``: the first picture or sound that is too many."""
    return ValidationError(
        field, f"`{field}`: a request may have at most {limit} images and audio files. Given: {given}"
    )


def token_id_error(field: str, vocabulary_size: int, given: int) -> ValidationError:
    return ValidationError(field, f"`{field}` token ids must be >= 0 and < {vocabulary_size}. Given: {shown(given)}")
