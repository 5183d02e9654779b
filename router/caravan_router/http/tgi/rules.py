"""Rules that only TGI's routes have, one error class each. Messages are TGI's where TGI has the rule."""

from collections.abc import Sequence

from caravan_router.http.generation.rules import shown
from caravan_router.http.server.errors import ValidationError


class BestOfDisabledError(ValidationError):
    def __init__(self, given: int) -> None:
        super().__init__("best_of", f"`best_of` != 1 is not allowed for this endpoint. Given: {shown(given)}")


class BestOfWithoutSamplingError(ValidationError):
    def __init__(self, given: int) -> None:
        super().__init__("best_of", f"you must use sampling when `best_of` is > 1. Given: {given}")


class BestOfWithSeedError(ValidationError):
    def __init__(self, seed: int) -> None:
        super().__init__("seed", f"`seed` must not be set when `best_of` > 1. Given: {shown(seed)}")


class BestOfStreamingError(ValidationError):
    def __init__(self, given: int) -> None:
        super().__init__("best_of", f"`best_of` != 1 is not supported when streaming tokens. Given: {shown(given)}")


class TruncateError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        message = f"`truncate` must be strictly positive and less than {limit}. Given: {shown(given)}"
        super().__init__("truncate", message)


class PrefillDetailsStreamError(ValidationError):
    def __init__(self) -> None:
        super().__init__(
            "decoder_input_details", "`decoder_input_details` == true is not supported when streaming tokens"
        )


class UnknownAdapterError(ValidationError):
    def __init__(self, field: str, adapters: Sequence[str], given: str) -> None:
        served = ", ".join(f"`{name}`" for name in adapters) or "there are none"
        super().__init__(field, f"`{field}` must be one of the adapters served: {served}. Given: {shown(given)}")
