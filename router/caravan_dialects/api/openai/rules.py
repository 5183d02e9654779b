"""Rules that only OpenAI's routes have, one function each."""

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.rules import shown


def not_a_probability_error(field: str, given: float) -> ValidationError:
    """OpenAI excludes 0 and includes 1."""
    return ValidationError(field, f"`{field}` must be > 0.0 and <= 1.0. Given: {shown(given)}")


def best_of_below_n_error(n: int, given: int) -> ValidationError:
    return ValidationError("best_of", f"`best_of` must be >= `n`. Given: `best_of` {given} and `n` {n}")


def best_of_above_n_streaming_error(n: int, given: int) -> ValidationError:
    """The best candidates are known only at the end."""
    message = f"`best_of` > `n` is not supported when streaming. Given: `best_of` {given} and `n` {n}"
    return ValidationError("best_of", message)


def choice_parameters_error(expected: int, given: int) -> ValidationError:
    message = f"`choice_parameters` must have {expected} entries, one for each output. Given: {given}"
    return ValidationError("choice_parameters", message)


def mirostat_error(given: float) -> ValidationError:
    message = f"`adaptive_target` and `mirostat` cannot be used together: both choose the token. Given: {given}"
    return ValidationError("adaptive_target", message)


def unknown_sampler_error(field: str, known: tuple[str, ...], given: str) -> ValidationError:
    return ValidationError(field, f"`{field}` must be among {', '.join(known)}. Given: {shown(given)}")


def repeated_sampler_error(field: str, given: str) -> ValidationError:
    return ValidationError(field, f"`{field}` must name each sampler at most once. Given twice: {shown(given)}")


def too_many_biases_error(limit: int, given: int) -> ValidationError:
    return ValidationError("logit_bias", f"`logit_bias` must have at most {limit} entries. Given: {given}")


def biased_token_error(vocabulary_size: int, given: str) -> ValidationError:
    message = f"`logit_bias` keys must be token ids >= 0 and < {vocabulary_size}. Given: {shown(given)}"
    return ValidationError("logit_bias", message)


def hidden_reasoning_error(given: str) -> ValidationError:
    field = "reasoning_format"
    reason = "without reasoning, which it leaves in the content"
    return ValidationError(field, f"`{field}` cannot be used for a reply {reason}. Given: {shown(given)}")


def two_constraints_error(first: str, second: str) -> ValidationError:
    message = f"`{first}` and `{second}` cannot be used together: an output can follow only one"
    return ValidationError(second, message)


def ignore_eos_error(field: str) -> ValidationError:
    message = f"`ignore_eos` cannot be used with `{field}`: an output that matches it ends when it is complete"
    return ValidationError("ignore_eos", message)


def suffix_error(given: str) -> ValidationError:
    """The message is TGI's."""
    message = "Suffix is not supported and can be achieved by preprocessing the prompt."
    return ValidationError("suffix", f"{message} Given: {shown(given)}")


def stream_options_error() -> ValidationError:
    return ValidationError("stream_options", "`stream_options` may be set only when `stream` is true")


def needs_field_error(field: str, needed: str, given: object) -> ValidationError:
    """The field has a meaning only with another one."""
    return ValidationError(field, f"`{field}` may be set only when {needed}. Given: {shown(given)}")


def beam_field_error(field: str, given: object) -> ValidationError:
    """A beam search has no use for the field."""
    return ValidationError(field, f"`{field}` cannot be used with `use_beam_search`. Given: {shown(given)}")


def alias_error(field: str, alias: str, given: float | str, given_alias: float | str) -> ValidationError:
    """Two fields that mean the same have different values."""
    message = f"`{field}` and `{alias}` must not differ. Given: {shown(given)} and {shown(given_alias)}"
    return ValidationError(alias, message)


def continue_error(reason: str) -> ValidationError:
    return ValidationError("continue_final_message", f"`continue_final_message` must not be true when {reason}")


def empty_messages_error() -> ValidationError:
    return ValidationError("messages", "`messages` cannot be empty")


def template_option_error(field: str, rule: str, given: object) -> ValidationError:
    return ValidationError(field, f"`{field}` must {rule}. Given: {shown(given)}")


def missing_field_error(field: str) -> ValidationError:
    return ValidationError(field, f"`{field}` is missing")


def two_names_error(field: str, alias: str) -> ValidationError:
    """Two names of one field are both set."""
    return ValidationError(alias, f"`{alias}` is another name of `{field}`: only one of them may be set")


def pairs_error(field: str, first: int, second: int) -> ValidationError:
    message = f"`{field}`: one side must have one text, or both sides the same number"
    return ValidationError(field, f"{message}. Given: {first} and {second}")


def nested_error(field: str, limit: int) -> ValidationError:
    return ValidationError(field, f"`{field}` must be nested at most {limit} deep")


def too_many_tools_error(limit: int, given: int) -> ValidationError:
    return ValidationError("tools", f"`tools` must have at most {limit} entries. Given: {given}")


def function_name_error(field: str, given: str) -> ValidationError:
    message = f"`{field}` must be unique and have 1 to 64 letters, digits, `_`, `.` or `-`. Given: {shown(given)}"
    return ValidationError(field, message)


def control_texts_error(limit: int, given: int) -> ValidationError:
    message = f"`messages` must have at most {limit} texts of control tokens. Given: {given}"
    return ValidationError("messages", message)


def no_vectors_error() -> ValidationError:
    return ValidationError("", "embeddings are not served here: they need shards that were started with --embeddings")


def no_scores_error() -> ValidationError:
    message = "they need a model with vectors or one that ranks, on shards that were started with --embeddings"
    return ValidationError("", f"scores are not served here: {message}")


def ranking_model_error() -> ValidationError:
    return ValidationError("", "this model ranks documents and has no vectors: use /v1/rerank or /v1/score")


def adapter_vectors_error(given: str) -> ValidationError:
    return ValidationError(
        "model", f"`model` must not be an adapter: vectors are the model's own. Given: {shown(given)}"
    )


def dimensions_error(size: int, given: int) -> ValidationError:
    message = f"`dimensions` must be {size}, the length of the model's vectors. Given: {shown(given)}"
    return ValidationError("dimensions", message)


def mixed_prompt_error(field: str) -> ValidationError:
    return ValidationError(
        field, f"`{field}` must be a text, a list of texts, a list of token ids or a list of such lists"
    )


def prompt_tokens_error(field: str) -> ValidationError:
    message = f"`prompt_token_ids` is the whole prompt: `{field}` must be empty"
    return ValidationError("prompt_token_ids", message)


def too_many_stop_tokens_error(limit: int, given: int) -> ValidationError:
    return ValidationError("stop_token_ids", f"`stop_token_ids` must have at most {limit} entries. Given: {given}")
