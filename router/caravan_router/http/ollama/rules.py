"""Rules that only Ollama's routes have."""

from caravan_router.http.server.errors import ValidationError


class ImagesError(ValidationError):
    def __init__(self, field: str, given: int) -> None:
        super().__init__(field, f"`{field}` is not supported: the model reads text only. Given: {given} images")


class InsertError(ValidationError):
    """The message is Ollama's."""

    def __init__(self, model: str) -> None:
        super().__init__("suffix", f"{model} does not support insert: its vocabulary has no tokens for `suffix`")
