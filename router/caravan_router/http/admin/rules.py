"""Rules that only the routes for operators have, one error class each."""

from caravan_router.http.generation.rules import shown
from caravan_router.http.server.errors import ValidationError


class UnknownParameterError(ValidationError):
    """The URL has an unknown parameter. Other routes ignore it; here a misspelt ``shard`` would affect all shards."""

    def __init__(self, known: str, given: str) -> None:
        super().__init__(given, f"the URL may have the parameter `{known}` only. Given: {shown(given)}")
