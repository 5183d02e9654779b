"""One error for each rule a request can break. Each names the field, the limit and what was given."""

from collections.abc import Sequence

from caravan_router.http.server.errors import ValidationError

_SHOWN_CHARACTERS = 80
_REASON_CHARACTERS = 300


def _shown(value: object) -> str:
    # A client's value goes back to it and into the log: bounded, and one line.
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


class BodyMismatchError(ValidationError):
    """A field that is unknown, missing or of the wrong type."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)


class UnsupportedFieldError(ValidationError):
    """A field that is known, but not built; ``neutral`` says what is accepted in its place."""

    def __init__(self, field: str, neutral: str, given: object) -> None:
        super().__init__(field, f"`{field}` is not supported: leave it out, or {neutral}. Given: {_shown(given)}")


class NotStrictlyPositiveError(ValidationError):
    def __init__(self, field: str, given: float) -> None:
        super().__init__(field, f"`{field}` must be strictly positive. Given: {_shown(given)}")


class OutOfRangeError(ValidationError):
    def __init__(self, field: str, low: float, high: float, given: float) -> None:
        super().__init__(field, f"`{field}` must be >= {low} and <= {high}. Given: {_shown(given)}")


class NotBetweenZeroAndOneError(ValidationError):
    """Both ends excluded, as TGI has it: to switch the filter off, leave the field out."""

    def __init__(self, field: str, given: float) -> None:
        super().__init__(field, f"`{field}` must be > 0.0 and < 1.0. Given: {_shown(given)}")


class NotAProbabilityError(ValidationError):
    """Zero excluded, one included, as OpenAI has it."""

    def __init__(self, field: str, given: float) -> None:
        super().__init__(field, f"`{field}` must be > 0.0 and <= 1.0. Given: {_shown(given)}")


class CandidatesError(ValidationError):
    """``n`` or ``best_of``, in TGI's words."""

    def __init__(self, field: str, limit: int, given: int) -> None:
        super().__init__(field, f"`{field}` must be > 0 and <= {limit}. Given: {_shown(given)}")


class BestOfDisabledError(ValidationError):
    def __init__(self, given: int) -> None:
        super().__init__("best_of", f"`best_of` != 1 is not allowed for this endpoint. Given: {_shown(given)}")


class BestOfBelowNError(ValidationError):
    def __init__(self, n: int, given: int) -> None:
        super().__init__("best_of", f"`best_of` must be >= `n`. Given: `best_of` {given} and `n` {n}")


class BestOfAboveNStreamingError(ValidationError):
    """Which are the best is known only in the end."""

    def __init__(self, n: int, given: int) -> None:
        message = f"`best_of` > `n` is not supported when streaming. Given: `best_of` {given} and `n` {n}"
        super().__init__("best_of", message)


class ChoiceParametersError(ValidationError):
    def __init__(self, expected: int, given: int) -> None:
        message = f"`choice_parameters` must have {expected} entries, as `best_of` or else `n` says. Given: {given}"
        super().__init__("choice_parameters", message)


class TooManyBiasesError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        super().__init__("logit_bias", f"`logit_bias` must have at most {limit} entries. Given: {given}")


class BiasedTokenError(ValidationError):
    def __init__(self, vocabulary_size: int, given: str) -> None:
        message = f"`logit_bias` keys must be token ids >= 0 and < {vocabulary_size}. Given: {_shown(given)}"
        super().__init__("logit_bias", message)


class BestOfWithoutSamplingError(ValidationError):
    def __init__(self, given: int) -> None:
        super().__init__("best_of", f"you must use sampling when `best_of` is > 1. Given: {given}")


class BestOfWithSeedError(ValidationError):
    def __init__(self, seed: int) -> None:
        super().__init__("seed", f"`seed` must not be set when `best_of` > 1. Given: {_shown(seed)}")


class BestOfStreamingError(ValidationError):
    def __init__(self, given: int) -> None:
        super().__init__("best_of", f"`best_of` != 1 is not supported when streaming tokens. Given: {_shown(given)}")


class PriorityError(ValidationError):
    def __init__(self, field: str, limit: int, given: int) -> None:
        super().__init__(field, f"`{field}` may be at most {limit} with this API key. Given: {given}")


class CacheSaltError(ValidationError):
    def __init__(self, limit_bytes: int, given_bytes: int) -> None:
        message = f"`cache_salt` must have 1 to {limit_bytes} bytes. Given: {given_bytes}"
        super().__init__("cache_salt", message)


class HeaderError(ValidationError):
    def __init__(self, header: str, expected: str, given: str) -> None:
        super().__init__(header, f"header `{header}` must be {expected}. Given: {_shown(given)}")


class TooManyStopsError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        super().__init__("stop", f"`stop` supports up to {limit} stop sequences. Given: {given}")


class EmptyStopError(ValidationError):
    def __init__(self) -> None:
        super().__init__("stop", '`stop` must not contain empty strings. Given: ""')


class StopTooLongError(ValidationError):
    def __init__(self, limit_bytes: int, given_bytes: int) -> None:
        super().__init__("stop", f"`stop` sequences must have at most {limit_bytes} bytes. Given: {given_bytes}")


class TruncateError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        message = f"`truncate` must be strictly positive and less than {limit}. Given: {_shown(given)}"
        super().__init__("truncate", message)


class EmptyPromptError(ValidationError):
    def __init__(self, field: str) -> None:
        super().__init__(field, f"`{field}` cannot be empty")


class TooManyBytesError(ValidationError):
    def __init__(self, field: str, limit: int, given: int) -> None:
        super().__init__(field, f"`{field}` must have at most {limit} bytes. Given: {given}")


class PromptTooLongError(ValidationError):
    """TGI's words; exactly ``limit`` is allowed."""

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
    """Together, what each generation of a request may have is too much."""

    def __init__(self, field: str, limit: int, given: int) -> None:
        message = f"`{field}` times the number of generations must be <= {limit} tokens. Given: {given}"
        super().__init__(field, message)


class InvalidGrammarError(ValidationError):
    """TGI's words, with our field's name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, f"{field} is not valid: {problem[:_REASON_CHARACTERS]}")


class TwoConstraintsError(ValidationError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(second, f"`{first}` and `{second}` cannot be used together: an output keeps to one of them")


class IgnoreEosError(ValidationError):
    def __init__(self, field: str) -> None:
        message = f"`ignore_eos` cannot be used with `{field}`: what matches it ends where it is complete"
        super().__init__("ignore_eos", message)


class UnknownAdapterError(ValidationError):
    def __init__(self, field: str, adapters: Sequence[str], given: str) -> None:
        served = ", ".join(f"`{name}`" for name in adapters) or "there are none"
        super().__init__(field, f"`{field}` must be one of the adapters served: {served}. Given: {_shown(given)}")


class SuffixError(ValidationError):
    """TGI's words."""

    def __init__(self, given: str) -> None:
        message = "Suffix is not supported and can be achieved by preprocessing the prompt."
        super().__init__("suffix", f"{message} Given: {_shown(given)}")


class PrefillDetailsStreamError(ValidationError):
    def __init__(self) -> None:
        super().__init__(
            "decoder_input_details", "`decoder_input_details` == true is not supported when streaming tokens"
        )


class MixedPromptError(ValidationError):
    def __init__(self, field: str) -> None:
        super().__init__(
            field, f"`{field}` must be a text, a list of texts, a list of token ids or a list of such lists"
        )


class TooManyPromptsError(ValidationError):
    def __init__(self, field: str, limit: int, given: int) -> None:
        message = f"Number of prompts exceeds the maximum allowed batch size of {limit}. Given: {given}"
        super().__init__(field, message)


class TokenIdError(ValidationError):
    def __init__(self, field: str, vocabulary_size: int, given: int) -> None:
        super().__init__(field, f"`{field}` token ids must be >= 0 and < {vocabulary_size}. Given: {_shown(given)}")


class StreamOptionsError(ValidationError):
    def __init__(self) -> None:
        super().__init__("stream_options", "`stream_options` may be set only when `stream` is true")


class NoVectorsError(ValidationError):
    def __init__(self) -> None:
        super().__init__("", "embeddings are not served here: they need shards that were started with --embeddings")


class AdapterVectorsError(ValidationError):
    def __init__(self, given: str) -> None:
        super().__init__(
            "model", f"`model` must not be an adapter: vectors are the model's own. Given: {_shown(given)}"
        )


class DimensionsError(ValidationError):
    def __init__(self, size: int, given: int) -> None:
        super().__init__("dimensions", f"`dimensions` must be {size}, as the model has it. Given: {_shown(given)}")


class NeedsFieldError(ValidationError):
    """A field that means something only beside another one."""

    def __init__(self, field: str, needed: str, given: object) -> None:
        super().__init__(field, f"`{field}` may be set only when {needed}. Given: {_shown(given)}")


class EmptyMessagesError(ValidationError):
    def __init__(self) -> None:
        super().__init__("messages", "`messages` cannot be empty")


class MissingFieldError(ValidationError):
    def __init__(self, field: str) -> None:
        super().__init__(field, f"`{field}` is missing")


class NotTextError(ValidationError):
    def __init__(self, field: str, kind: str) -> None:
        super().__init__(field, f"`{field}` is not text, which is all the model reads. Given: type {_shown(kind)}")


class ImagesError(ValidationError):
    def __init__(self, field: str, given: int) -> None:
        super().__init__(field, f"`{field}` is not supported: the model reads text only. Given: {given} images")


class MaxTokensError(ValidationError):
    """The two fields mean the same."""

    def __init__(self, given: int, given_completion: int) -> None:
        message = (
            "`max_tokens` and `max_completion_tokens` must not differ. "
            f"Given: {_shown(given)} and {_shown(given_completion)}"
        )
        super().__init__("max_completion_tokens", message)


class ContinueError(ValidationError):
    def __init__(self, reason: str) -> None:
        super().__init__("continue_final_message", f"`continue_final_message` must not be true when {reason}")


class NestedError(ValidationError):
    def __init__(self, field: str, limit: int) -> None:
        super().__init__(field, f"`{field}` must be nested at most {limit} deep")


class TooManyToolsError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        super().__init__("tools", f"`tools` must have at most {limit} entries. Given: {given}")


class FunctionNameError(ValidationError):
    def __init__(self, field: str, given: str) -> None:
        message = f"`{field}` must be 1 to 64 letters, digits, `_`, `.` or `-`, and no other's. Given: {_shown(given)}"
        super().__init__(field, message)


class ControlTextsError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        message = f"`messages` must have at most {limit} texts of control tokens. Given: {given}"
        super().__init__("messages", message)
