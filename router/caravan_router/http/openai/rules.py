"""Rules that only OpenAI's routes have, one error class each."""

from caravan_router.http.generation.rules import shown
from caravan_router.http.server.errors import ValidationError


class NotAProbabilityError(ValidationError):
    """OpenAI excludes 0 and includes 1."""

    def __init__(self, field: str, given: float) -> None:
        super().__init__(field, f"`{field}` must be > 0.0 and <= 1.0. Given: {shown(given)}")


class BestOfBelowNError(ValidationError):
    def __init__(self, n: int, given: int) -> None:
        super().__init__("best_of", f"`best_of` must be >= `n`. Given: `best_of` {given} and `n` {n}")


class BestOfAboveNStreamingError(ValidationError):
    """The best candidates are known only at the end."""

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
        message = f"`logit_bias` keys must be token ids >= 0 and < {vocabulary_size}. Given: {shown(given)}"
        super().__init__("logit_bias", message)


class TwoConstraintsError(ValidationError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(second, f"`{first}` and `{second}` cannot be used together: an output keeps to one of them")


class IgnoreEosError(ValidationError):
    def __init__(self, field: str) -> None:
        message = f"`ignore_eos` cannot be used with `{field}`: what matches it ends where it is complete"
        super().__init__("ignore_eos", message)


class SuffixError(ValidationError):
    """The message is TGI's."""

    def __init__(self, given: str) -> None:
        message = "Suffix is not supported and can be achieved by preprocessing the prompt."
        super().__init__("suffix", f"{message} Given: {shown(given)}")


class StreamOptionsError(ValidationError):
    def __init__(self) -> None:
        super().__init__("stream_options", "`stream_options` may be set only when `stream` is true")


class NeedsFieldError(ValidationError):
    """The field has a meaning only with another one."""

    def __init__(self, field: str, needed: str, given: object) -> None:
        super().__init__(field, f"`{field}` may be set only when {needed}. Given: {shown(given)}")


class BeamFieldError(ValidationError):
    """A beam search has no use for the field."""

    def __init__(self, field: str, given: object) -> None:
        super().__init__(field, f"`{field}` cannot be used with `use_beam_search`. Given: {shown(given)}")


class AliasError(ValidationError):
    """Two fields that mean the same have different values."""

    def __init__(self, field: str, alias: str, given: int, given_alias: int) -> None:
        message = f"`{field}` and `{alias}` must not differ. Given: {shown(given)} and {shown(given_alias)}"
        super().__init__(alias, message)


class ContinueError(ValidationError):
    def __init__(self, reason: str) -> None:
        super().__init__("continue_final_message", f"`continue_final_message` must not be true when {reason}")


class EmptyMessagesError(ValidationError):
    def __init__(self) -> None:
        super().__init__("messages", "`messages` cannot be empty")


class NoThoughtsError(ValidationError):
    def __init__(self, field: str, given: object) -> None:
        message = f"`{field}` needs a model that thinks: the chat template of this one shows no thoughts"
        super().__init__(field, f"{message}. Given: {shown(given)}")


class MissingFieldError(ValidationError):
    def __init__(self, field: str) -> None:
        super().__init__(field, f"`{field}` is missing")


class TwoNamesError(ValidationError):
    """Two names of one field are both set."""

    def __init__(self, field: str, alias: str) -> None:
        super().__init__(alias, f"`{alias}` is another name of `{field}`: only one of them may be set")


class PairsError(ValidationError):
    def __init__(self, field: str, first: int, second: int) -> None:
        message = f"`{field}` must have one text, or as many as the other side, unless that has one"
        super().__init__(field, f"{message}. Given: {first} and {second}")


class NotTextError(ValidationError):
    def __init__(self, field: str, kind: str) -> None:
        super().__init__(field, f"`{field}` is not text, which is all the model reads. Given: type {shown(kind)}")


class NestedError(ValidationError):
    def __init__(self, field: str, limit: int) -> None:
        super().__init__(field, f"`{field}` must be nested at most {limit} deep")


class TooManyToolsError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        super().__init__("tools", f"`tools` must have at most {limit} entries. Given: {given}")


class FunctionNameError(ValidationError):
    def __init__(self, field: str, given: str) -> None:
        message = f"`{field}` must be 1 to 64 letters, digits, `_`, `.` or `-`, and no other's. Given: {shown(given)}"
        super().__init__(field, message)


class ControlTextsError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        message = f"`messages` must have at most {limit} texts of control tokens. Given: {given}"
        super().__init__("messages", message)


class NoVectorsError(ValidationError):
    def __init__(self) -> None:
        super().__init__("", "embeddings are not served here: they need shards that were started with --embeddings")


class NoScoresError(ValidationError):
    def __init__(self) -> None:
        message = "they need a model with vectors or one that ranks, on shards that were started with --embeddings"
        super().__init__("", f"scores are not served here: {message}")


class RankingModelError(ValidationError):
    def __init__(self) -> None:
        super().__init__("", "this model ranks documents and has no vectors: use /v1/rerank or /v1/score")


class AdapterVectorsError(ValidationError):
    def __init__(self, given: str) -> None:
        super().__init__("model", f"`model` must not be an adapter: vectors are the model's own. Given: {shown(given)}")


class DimensionsError(ValidationError):
    def __init__(self, size: int, given: int) -> None:
        super().__init__("dimensions", f"`dimensions` must be {size}, as the model has it. Given: {shown(given)}")


class MixedPromptError(ValidationError):
    def __init__(self, field: str) -> None:
        super().__init__(
            field, f"`{field}` must be a text, a list of texts, a list of token ids or a list of such lists"
        )


class PromptTokensError(ValidationError):
    def __init__(self, field: str) -> None:
        message = f"`prompt_token_ids` is the whole prompt: `{field}` must be empty"
        super().__init__("prompt_token_ids", message)


class TooManyStopTokensError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        super().__init__("stop_token_ids", f"`stop_token_ids` must have at most {limit} entries. Given: {given}")
