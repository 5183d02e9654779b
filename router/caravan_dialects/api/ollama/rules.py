"""Rules that only Ollama's routes have."""

from caravan_dialects.api.errors import ValidationError


def insert_error(model: str) -> ValidationError:
    """The message is Ollama's."""
    return ValidationError("suffix", f"{model} does not support insert: its vocabulary has no tokens for `suffix`")


def keep_alive_error(given: str | float) -> ValidationError:
    rule = 'must be seconds, or a duration such as "5m" or "1h30m"; negative to keep the model loaded'
    return ValidationError("keep_alive", f"`keep_alive` {rule}. Given: {str(given)[:80]!r}")
