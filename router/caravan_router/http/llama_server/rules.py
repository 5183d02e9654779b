"""Rules that only llama-server's routes have."""

from caravan_router.http.generation.rules import shown
from caravan_router.http.server.errors import ValidationError


class SamplerError(ValidationError):
    def __init__(self, known: tuple[str, ...], given: str) -> None:
        super().__init__("samplers", f"`samplers` must be among {', '.join(known)}. Given: {shown(given)}")


class InfillError(ValidationError):
    def __init__(self, model: str) -> None:
        super().__init__("", f"{model} cannot fill in: its vocabulary has no tokens for that")


class TooManyExtraPartsError(ValidationError):
    def __init__(self, limit: int, given: int) -> None:
        super().__init__("input_extra", f"`input_extra` may have at most {limit} entries. Given: {given}")
