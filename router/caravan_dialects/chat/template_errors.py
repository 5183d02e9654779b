"""What keeps a chat template from giving a text."""


class TemplateError(Exception):
    """The template cannot render this conversation, or the model has no template."""


class TemplateOutputError(TemplateError):
    """The template renders more text than is allowed."""

    def __init__(self, limit_bytes: int, given_bytes: int) -> None:
        super().__init__(f"its text has more than {limit_bytes} bytes. Given: at least {given_bytes}")
        self.limit_bytes = limit_bytes
        self.given_bytes = given_bytes


class TemplateStoppedError(TemplateError):
    """The template took too much time or memory."""
