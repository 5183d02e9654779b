"""Rules that only TGI's routes have, one function each. Messages are TGI's where TGI has the rule."""

from collections.abc import Sequence

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.rules import shown


def best_of_disabled_error(given: int) -> ValidationError:
    return ValidationError("best_of", f"`best_of` != 1 is not allowed for this endpoint. Given: {shown(given)}")


def best_of_without_sampling_error(given: int) -> ValidationError:
    return ValidationError("best_of", f"you must use sampling when `best_of` is > 1. Given: {given}")


def best_of_with_seed_error(seed: int) -> ValidationError:
    return ValidationError("seed", f"`seed` must not be set when `best_of` > 1. Given: {shown(seed)}")


def best_of_streaming_error(given: int) -> ValidationError:
    return ValidationError("best_of", f"`best_of` != 1 is not supported when streaming tokens. Given: {shown(given)}")


def truncate_error(limit: int, given: int) -> ValidationError:
    message = f"`truncate` must be strictly positive and less than {limit}. Given: {shown(given)}"
    return ValidationError("truncate", message)


def prefill_details_stream_error() -> ValidationError:
    return ValidationError(
        "decoder_input_details", "`decoder_input_details` == true is not supported when streaming tokens"
    )


def unknown_adapter_error(field: str, adapters: Sequence[str], given: str) -> ValidationError:
    served = ", ".join(f"`{name}`" for name in adapters) or "there are none"
    return ValidationError(field, f"`{field}` must be one of the adapters served: {served}. Given: {shown(given)}")
